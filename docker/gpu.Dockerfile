# Meshwright on NVIDIA GPUs. torch's wheels from PyPI bring CUDA and NCCL; the base brings the compiler tools that
# torch.compile calls. The host brings the driver.
#   docker build --file docker/gpu.Dockerfile --tag meshwright:gpu .
FROM nvidia/cuda:12.8.1-devel-ubuntu24.04
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ make python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/meshwright
COPY . .
RUN docker/install.sh
ENV PATH=/opt/meshwright/.venv/bin:$PATH
WORKDIR /work
ENTRYPOINT ["meshwright"]
CMD ["--help"]
