# Images of Baton: `router` (no torch), `worker` (CUDA 13) and `worker-cpu`.
#
#   docker build --target router -t baton-router:0.1.0 .
#   docker build --target worker -t baton-worker:0.1.0 .
#   docker build --target worker-cpu --build-arg PIP_ARGS='--extra-index-url URL-OF-CPU-WHEELS' \
#     -t baton-worker-cpu:0.1.0 .
#
# Every Python package has the version of constraints.txt; their metadata stays in /opt/baton,
# where tools that list an image's contents find it. The processes run as user 10001, write
# nothing but /scratch and /tmp, and so need no writable root.
#
# A tag may come to mean another image. To build from the same one every time, name its digest,
# which `docker buildx imagetools inspect python:3.11.14-slim-bookworm` tells:
#
#   --build-arg PYTHON_IMAGE=python:3.11.14-slim-bookworm@sha256:…
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm

FROM ${PYTHON_IMAGE} AS base
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore

# --- What is installed: one environment for each image, all in /opt/baton.
FROM base AS build
ARG PIP_ARGS=""
WORKDIR /src
RUN python -m venv /opt/baton
COPY pyproject.toml constraints.txt README.md LICENSE ./
# What builds Baton's own package is pinned, too.
RUN /opt/baton/bin/pip install $PIP_ARGS -c constraints.txt setuptools

FROM build AS build-router
COPY proto proto
COPY core core
COPY engine engine
COPY kvtransfer kvtransfer
COPY worker worker
COPY prefill_svc prefill_svc
COPY decode_svc decode_svc
COPY router router
COPY client client
COPY bench bench
RUN /opt/baton/bin/pip install $PIP_ARGS -c constraints.txt --no-build-isolation '.[otel]'

# torch comes first and alone: what it finds installed decides nothing about its variant.
FROM build AS torch
RUN /opt/baton/bin/pip install $PIP_ARGS "$(grep '^torch==' constraints.txt)"

FROM torch AS build-worker
COPY --from=build-router /src .
RUN /opt/baton/bin/pip install $PIP_ARGS -c constraints.txt --no-build-isolation '.[cu13,otel]'

FROM torch AS build-worker-cpu
COPY --from=build-router /src .
RUN /opt/baton/bin/pip install $PIP_ARGS -c constraints.txt --no-build-isolation '.[cpu,otel]'

# --- What runs.
FROM base AS runtime
# tini: a process with number 1 would ignore SIGTERM until it listens for it.
RUN apt-get update && apt-get install -y --no-install-recommends tini \
  && rm -rf /var/lib/apt/lists/* \
  && useradd --uid 10001 --user-group --create-home baton && chmod 755 /home/baton \
  && install -d -o baton -g baton /scratch
ENV PATH=/opt/baton/bin:$PATH HOME=/home/baton PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
  HF_HOME=/scratch/hub XDG_CACHE_HOME=/scratch/cache
WORKDIR /
ENTRYPOINT ["tini", "-s", "--"]

FROM runtime AS router
COPY --from=build-router /opt/baton /opt/baton
USER 10001:10001
EXPOSE 50051 8000
CMD ["python", "-m", "router"]

# Triton compiles a small C program for each kernel; UCX reaches RDMA cards by libibverbs.
FROM runtime AS worker
RUN apt-get update && apt-get install -y --no-install-recommends \
    gcc libc6-dev ibverbs-providers libibverbs1 librdmacm1 \
  && rm -rf /var/lib/apt/lists/*
ENV TRITON_CACHE_DIR=/scratch/triton
COPY --from=build-worker /opt/baton /opt/baton
USER 10001:10001
EXPOSE 50052 50053
CMD ["python", "-m", "decode_svc"]

FROM runtime AS worker-cpu
# The compiler builds what speeds up the CPU.
RUN apt-get update && apt-get install -y --no-install-recommends g++ \
  && rm -rf /var/lib/apt/lists/*
COPY --from=build-worker-cpu /opt/baton /opt/baton
USER 10001:10001
EXPOSE 50052 50053
CMD ["python", "-m", "decode_svc"]
