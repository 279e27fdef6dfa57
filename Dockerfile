# Two images, built by the Makefile's own steps; each serves the bundled model unless it is given another one.
#   docker build --target cpu -t carousel .        docker run --rm --network host --shm-size 1g carousel
#   docker build --target gpu -t carousel-gpu .    docker run --rm --network host --shm-size 1g --gpus all carousel-gpu serve MODEL
# The native code is built here for four kinds of x86-64 machines: the CPU image has no compiler and needs none.

FROM python:3.11-slim AS build-gpu
RUN apt-get update && apt-get install -y --no-install-recommends g++ make && rm -rf /var/lib/apt/lists/*
WORKDIR /carousel
COPY . .
RUN make .venv/runtime.done

FROM python:3.11-slim AS build-cpu
# torch without CUDA: the same version, 3 GB less
ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
RUN apt-get update && apt-get install -y --no-install-recommends g++ make && rm -rf /var/lib/apt/lists/*
WORKDIR /carousel
COPY . .
RUN make .venv/runtime.done
RUN XDG_CACHE_HOME=/carousel/.cache make native

FROM python:3.11-slim AS base
RUN useradd --create-home carousel
ENV PATH=/carousel/.venv/bin:$PATH XDG_CACHE_HOME=/carousel/.cache
WORKDIR /carousel
EXPOSE 8000
# On the service's port inside the container, whatever it is published as.
HEALTHCHECK --start-period=120s --interval=10s --timeout=5s \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/ready', timeout=4)"]
ENTRYPOINT ["carousel"]
CMD ["serve"]

FROM base AS gpu
# Triton builds the launchers of its kernels with a C compiler.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY --from=build-gpu --chown=carousel /carousel /carousel
USER carousel

FROM base AS cpu
COPY --from=build-cpu --chown=carousel /carousel /carousel
USER carousel
