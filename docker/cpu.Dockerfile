# Meshwright on CPUs: to check, verify and plan recipes, and to try them on gloo ranks. docs/hosts.md has the rest.
#   docker build --file docker/cpu.Dockerfile --tag meshwright:cpu .
FROM python:3.12.11-slim-bookworm@sha256:519591d6871b7bc437060736b9f7456b8731f1499a57e22e6c285135ae657bf7 AS base
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# A compiler for torch.compile.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

FROM base AS build
# make for the README's install line, git for `make develop` in a devcontainer.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends git make \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/meshwright
COPY . .
RUN PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu docker/install.sh

FROM base
COPY --from=build /opt/meshwright /opt/meshwright
RUN useradd --create-home --uid 1000 meshwright && install --directory --owner=meshwright /work
ENV PATH=/opt/meshwright/.venv/bin:$PATH
USER 1000
WORKDIR /work
ENTRYPOINT ["meshwright"]
CMD ["--help"]
