# Meshwright on CPUs: to check, verify and plan recipes, and to try them on gloo ranks.
#   docker build --file docker/cpu.Dockerfile --tag meshwright:cpu .
FROM python:3.12.11-slim-bookworm
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# A compiler for torch.compile, make for the README's install line.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ make \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/meshwright
COPY . .
RUN PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu docker/install.sh
ENV PATH=/opt/meshwright/.venv/bin:$PATH
WORKDIR /work
ENTRYPOINT ["meshwright"]
CMD ["--help"]
