//go:build !cuda

package cudaipc

type gpuPeer struct{}
