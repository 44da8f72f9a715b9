package host

import (
	"unsafe"

	"golang.org/x/sys/cpu"
)

// moveMin is the shortest run for which the set-up of the fast forms pays, bytes. It is at least
// 64 + moveStep512.
const moveMin = 1024

// Bytes that one turn of the loops takes. Lengths given to them are multiples, and not zero.
const (
	moveStep512 = 256
	moveStep128 = 64
)

var (
	has512   = cpu.X86.HasAVX512F && cpu.X86.HasAVX512VPCLMULQDQ && has128
	has128   = cpu.X86.HasAVX && cpu.X86.HasPCLMULQDQ && cpu.X86.HasSSE42
	fastMove = has128
)

// moveSum512 and moveSum128 copy n bytes and fold a CRC-32C of them on the way: 512 and 128 bits at
// a time. dst is a multiple of 64. state and result are the CRC's register, that is the complement
// of what hash/crc32 gives.
//
//go:noescape
func moveSum512(dst, src unsafe.Pointer, n uintptr, state uint32) uint32

//go:noescape
func moveSum128(dst, src unsafe.Pointer, n uintptr, state uint32) uint32

// storeFence orders the stores of the loops above before everything that follows.
func storeFence()

// moveFast aligns dst to a cache line, runs a loop over whole steps, and copies the rest with
// movePortable.
func moveFast(dst, src []byte, state uint32) uint32 {
	if head := int(-uintptr(unsafe.Pointer(&dst[0])) & 63); head > 0 {
		state = movePortable(dst[:head], src[:head], state)
		dst, src = dst[head:], src[head:]
	}
	step, loop := moveStep128, moveSum128
	if has512 {
		step, loop = moveStep512, moveSum512
	}
	whole := len(src) &^ (step - 1)
	state = ^loop(unsafe.Pointer(&dst[0]), unsafe.Pointer(&src[0]), uintptr(whole), ^state)
	return movePortable(dst[whole:], src[whole:], state)
}
