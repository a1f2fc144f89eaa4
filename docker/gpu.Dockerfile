# Meshwright on NVIDIA GPUs. torch's wheels from PyPI bring CUDA and NCCL, Triton's its assembler; the host brings the driver.
# docs/hosts.md has the rest.
#   docker build --file docker/gpu.Dockerfile --tag meshwright:gpu .
#   docker build --file docker/gpu.Dockerfile --tag meshwright:gpu --build-arg EXTRAS=kernels .      # recurrent mixers' kernels, compiled
FROM nvidia/cuda:12.8.1-devel-ubuntu24.04@sha256:520292dbb4f755fd360766059e62956e9379485d9e073bbd2f6e3c20c270ed66 AS build
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ make python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/meshwright
COPY . .
ARG EXTRAS=
RUN docker/install.sh "$EXTRAS"

FROM nvidia/cuda:12.8.1-runtime-ubuntu24.04@sha256:ebef3c171eeef0298e4eb2e4be843105edf3b8b0ac45e0b43acee358e8046867
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# What torch.compile and Triton call, and the user space of InfiniBand, which NCCL opens at run time: without it NCCL falls back to TCP
# and says so only in its log. `ibv_devinfo` shows what a container sees.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ python3 python3-dev ibverbs-providers ibverbs-utils libibverbs1 \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/meshwright /opt/meshwright
# Ubuntu's image has a user of this number.
RUN userdel --remove ubuntu && useradd --create-home --uid 1000 meshwright && install --directory --owner=meshwright /work
ENV PATH=/opt/meshwright/.venv/bin:$PATH
USER 1000
WORKDIR /work
ENTRYPOINT ["meshwright"]
CMD ["--help"]
