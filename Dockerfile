# syntax=docker/dockerfile:1
# The agent's image: one binary that links C's library and no other, run by a user without rights.
#   docker build --build-arg VERSION=$(git describe --tags --always) -t kvagent .
# The CUDA path is in it and no CUDA library: the driver's comes with the node and is opened at run time (docs/GPU.md). Where there
# is none, the agent starts, says so, and serves engines on CPUs. Built without libzmq (tag nozmq), which serve does not need.

FROM golang:1.26.8-bookworm AS build
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
ARG VERSION=unknown
ENV CGO_CFLAGS="-O2 -g -I/src/third_party/cuda/include" CGO_LDFLAGS="-O2 -g -L/src/cudaipc/driver/stublib"
RUN go build -tags cuda,nozmq -trimpath -buildvcs=false -ldflags "-s -w -X main.version=${VERSION}" -o /out/kvagent ./cmd/kvagent

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
