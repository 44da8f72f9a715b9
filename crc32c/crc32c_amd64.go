package crc32c

import (
	"hash/crc32"
	"unsafe"

	"golang.org/x/sys/cpu"
)

// fastMin is the shortest run for which the set-up of the fast forms pays, bytes. It is at least
// 64 + step512.
const fastMin = 1024

// Bytes that one turn of the loops takes. Lengths given to them are multiples, and not zero.
const (
	step512 = 256
	step128 = 64
)

var (
	has512 = cpu.X86.HasAVX512F && cpu.X86.HasAVX512VPCLMULQDQ && has128
	has128 = cpu.X86.HasAVX && cpu.X86.HasPCLMULQDQ && cpu.X86.HasSSE42
	fast   = has128
)

// sum512 and sum128 fold a CRC-32C of n bytes, 512 and 128 bits at a time. state and result are the
// CRC's register, that is the complement of what hash/crc32 gives.
//
//go:noescape
func sum512(src unsafe.Pointer, n uintptr, state uint32) uint32

//go:noescape
func sum128(src unsafe.Pointer, n uintptr, state uint32) uint32

// copySum512 and copySum128 copy the bytes meanwhile. dst is a multiple of 64.
//
//go:noescape
func copySum512(dst, src unsafe.Pointer, n uintptr, state uint32) uint32

//go:noescape
func copySum128(dst, src unsafe.Pointer, n uintptr, state uint32) uint32

// StoreFence orders the stores of Copy before everything that follows.
func StoreFence()

// updateFast runs a loop over whole steps.
func updateFast(state uint32, p []byte) uint32 {
	step, loop := step128, sum128
	if has512 {
		step, loop = step512, sum512
	}
	whole := len(p) &^ (step - 1)
	state = ^loop(unsafe.Pointer(&p[0]), uintptr(whole), ^state)
	return crc32.Update(state, table, p[whole:])
}

// copyFast aligns dst to a cache line, runs a loop over whole steps, and copies the rest with
// copyPortable.
func copyFast(dst, src []byte, state uint32) uint32 {
	if head := int(-uintptr(unsafe.Pointer(&dst[0])) & 63); head > 0 {
		state = copyPortable(dst[:head], src[:head], state)
		dst, src = dst[head:], src[head:]
	}
	step, loop := step128, copySum128
	if has512 {
		step, loop = step512, copySum512
	}
	whole := len(src) &^ (step - 1)
	state = ^loop(unsafe.Pointer(&dst[0]), unsafe.Pointer(&src[0]), uintptr(whole), ^state)
	return copyPortable(dst[whole:], src[whole:], state)
}
