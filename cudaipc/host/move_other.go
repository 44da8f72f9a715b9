//go:build !amd64

package host

const (
	moveMin  = 0
	fastMove = false
)

func moveFast(dst, src []byte, state uint32) uint32 { return movePortable(dst, src, state) }

func storeFence() {}
