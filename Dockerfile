# syntax=docker/dockerfile:1
# The agent's image: the binary and the one library that it links, run by a user without rights.
#   docker build --build-arg VERSION=$(git describe --tags --always) -t kvagent .
# A build for GPUs adds its headers and its build tag to the first stage. The second stays as it is: the driver's
# library comes with the node and is opened at run time.

FROM golang:1.26.8-bookworm AS build
RUN apt-get update \
 && apt-get install -y --no-install-recommends libzmq3-dev=4.3.4-6* \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
ARG VERSION=unknown
RUN go build -trimpath -buildvcs=false -ldflags "-s -w -X main.version=${VERSION}" -o /out/kvagent ./cmd/kvagent

FROM debian:12.12-slim
ARG VERSION=unknown
LABEL org.opencontainers.image.title="kvagent" \
      org.opencontainers.image.description="The KV cache agent of a GPU node" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"
RUN apt-get update \
 && apt-get install -y --no-install-recommends libzmq5=4.3.4-6* \
 && rm -rf /var/lib/apt/lists/*
# The socket directory is a volume that engines mount too; --socket-group lets in those of other users.
RUN groupadd --gid 65532 kvagent \
 && useradd --uid 65532 --gid 65532 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin kvagent \
 && install -d -m 0700 -o 65532 -g 65532 /run/kvagent
COPY LICENSE /usr/share/doc/kvagent/LICENSE
COPY --from=build /out/kvagent /usr/local/bin/kvagent
USER 65532:65532
VOLUME /run/kvagent
ENTRYPOINT ["/usr/local/bin/kvagent"]
CMD ["serve", "--socket-dir", "/run/kvagent"]
