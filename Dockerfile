# syntax=docker/dockerfile:1
# The agent's image: one binary that links C's library and no other, run by a user without rights.
#   docker build --build-arg VERSION=$(git describe --tags --always) -t kvagent .
#   docker build --target mooncake -t kvagent:mooncake .          with Python and Mooncake's client, for --tier mooncake://
# The CUDA path is in it and no CUDA library: the driver's comes with the node and is opened at run time (docs/GPU.md). Where there
# is none, the agent starts, says so, and serves engines on CPUs.

FROM golang:1.26.8-bookworm AS build
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
ARG VERSION=unknown
ENV CGO_CFLAGS="-O2 -g -I/src/third_party/cuda/include" CGO_LDFLAGS="-O2 -g -L/src/cudaipc/driver/stublib"
RUN go build -tags cuda -trimpath -buildvcs=false -ldflags "-s -w -X main.version=${VERSION}" -o /out/kvagent ./cmd/kvagent

# The client works in memory of the host, also for RDMA, so it is the one without CUDA.
FROM debian:12.12-slim AS mooncake
RUN apt-get update \
 && apt-get install -y --no-install-recommends libcurl4=7.88.1-10* libibverbs1=44.0-2* libnuma1=2.0.16-1* libstdc++6=12.2.0-14* python3-venv=3.11.2-1* \
 && rm -rf /var/lib/apt/lists/*
COPY python/locks/mooncake.txt /usr/share/doc/kvagent/mooncake.txt
RUN python3 -m venv /opt/kvagent \
 && /opt/kvagent/bin/python -m pip install --no-cache-dir --only-binary :all: --require-hashes -r /usr/share/doc/kvagent/mooncake.txt
RUN groupadd --gid 65532 kvagent \
 && useradd --uid 65532 --gid 65532 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin kvagent \
 && install -d -m 0700 -o 65532 -g 65532 /run/kvagent
COPY LICENSE /usr/share/doc/kvagent/LICENSE
COPY python/kvagent /opt/kvagent/lib/python3.11/site-packages/kvagent
COPY --from=build /out/kvagent /usr/local/bin/kvagent
ENV PATH=/opt/kvagent/bin:/usr/local/bin:/usr/bin:/bin NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute
USER 65532:65532
VOLUME /run/kvagent
ENTRYPOINT ["/usr/local/bin/kvagent"]
CMD ["serve", "--socket-dir", "/run/kvagent"]

# scripts/release takes the configuration of its image from this stage.
FROM debian:12.12-slim
ARG VERSION=unknown
LABEL org.opencontainers.image.title="kvagent" \
      org.opencontainers.image.description="The KV cache agent of a GPU node" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"
# The socket directory is a volume that engines mount too; --socket-group lets in those of other users.
RUN groupadd --gid 65532 kvagent \
 && useradd --uid 65532 --gid 65532 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin kvagent \
 && install -d -m 0700 -o 65532 -g 65532 /run/kvagent
COPY LICENSE /usr/share/doc/kvagent/LICENSE
COPY --from=build /out/kvagent /usr/local/bin/kvagent
# For NVIDIA's container runtime: all GPUs of the node, and of the driver's libraries that of CUDA. Without it they mean nothing.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute
USER 65532:65532
VOLUME /run/kvagent
ENTRYPOINT ["/usr/local/bin/kvagent"]
CMD ["serve", "--socket-dir", "/run/kvagent"]
