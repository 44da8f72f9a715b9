#include "textflag.h"

// A CRC is a remainder of polynomials over GF(2), so D bytes can be taken from the front of a message when their
// product with x^(8D) is added after them. In the reflected order of CRC-32C, with P = 0x82f63b78, the two halves
// of 16 bytes are multiplied by x^(8D+31) mod P and x^(8D-33) mod P (the 31 and 33 are where a carry-less product
// of reflected operands comes to lie). TestFoldConstants computes each number below anew. The last
// 16 bytes are summed by the crc32 instruction. Source of the method: Gopal et al., "Fast CRC
// Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel, 2009.

DATA fold256<>+0(SB)/8, $0xdcb17aa4
DATA fold256<>+8(SB)/8, $0xb9e02b86
GLOBL fold256<>(SB), RODATA|NOPTR, $16
DATA fold64<>+0(SB)/8, $0x740eef02
DATA fold64<>+8(SB)/8, $0x9e4addf8
GLOBL fold64<>(SB), RODATA|NOPTR, $16
DATA fold48<>+0(SB)/8, $0x1c291d04
DATA fold48<>+8(SB)/8, $0xddc0152b
GLOBL fold48<>(SB), RODATA|NOPTR, $16
DATA fold32<>+0(SB)/8, $0x3da6d0cb
DATA fold32<>+8(SB)/8, $0xba4fc28e
GLOBL fold32<>(SB), RODATA|NOPTR, $16
DATA fold16<>+0(SB)/8, $0xf20c0dfe
DATA fold16<>+8(SB)/8, $0x493c7d27
GLOBL fold16<>(SB), RODATA|NOPTR, $16

// FOLD1 adds acc, folded by the constants in k, to into. tmp is lost, and acc.
#define FOLD1(k, acc, tmp, into) \
	VPCLMULQDQ $0x00, k, acc, tmp; \
	VPCLMULQDQ $0x11, k, acc, acc; \
	VPXOR tmp, into, into; \
	VPXOR acc, into, into

// FINISH sums the 16 bytes in last, into AX.
#define FINISH(last) \
	VMOVQ last, R9; \
	VPEXTRQ $1, last, R10; \
	XORL AX, AX; \
	CRC32Q R9, AX; \
	CRC32Q R10, AX; \
	VZEROUPPER

// REDUCE512 folds four times 64 bytes to one, and its four times 16 to one, and sums that.
#define REDUCE512 \
	VBROADCASTI32X4 fold64<>(SB), Z8; \
	VPCLMULQDQ $0x00, Z8, Z0, Z4; \
	VPCLMULQDQ $0x11, Z8, Z0, Z0; \
	VPTERNLOGQ $0x96, Z4, Z0, Z1; \
	VPCLMULQDQ $0x00, Z8, Z1, Z4; \
	VPCLMULQDQ $0x11, Z8, Z1, Z1; \
	VPTERNLOGQ $0x96, Z4, Z1, Z2; \
	VPCLMULQDQ $0x00, Z8, Z2, Z4; \
	VPCLMULQDQ $0x11, Z8, Z2, Z2; \
	VPTERNLOGQ $0x96, Z4, Z2, Z3; \
	VEXTRACTI32X4 $0, Z3, X0; \
	VEXTRACTI32X4 $1, Z3, X1; \
	VEXTRACTI32X4 $2, Z3, X2; \
	VEXTRACTI32X4 $3, Z3, X3; \
	REDUCE128

// REDUCE128 folds four times 16 bytes to one, and sums that.
#define REDUCE128 \
	VMOVDQU fold48<>(SB), X8; \
	FOLD1(X8, X0, X4, X3); \
	VMOVDQU fold32<>(SB), X8; \
	FOLD1(X8, X1, X4, X3); \
	VMOVDQU fold16<>(SB), X8; \
	FOLD1(X8, X2, X4, X3); \
	FINISH(X3)

// FOLD512 adds four times 64 bytes, Z10 to Z13, to the folded ones before. 0x96 is an exclusive or
// of three.
#define FOLD512 \
	VPCLMULQDQ $0x00, Z8, Z0, Z4; \
	VPCLMULQDQ $0x00, Z8, Z1, Z5; \
	VPCLMULQDQ $0x00, Z8, Z2, Z6; \
	VPCLMULQDQ $0x00, Z8, Z3, Z7; \
	VPCLMULQDQ $0x11, Z8, Z0, Z0; \
	VPCLMULQDQ $0x11, Z8, Z1, Z1; \
	VPCLMULQDQ $0x11, Z8, Z2, Z2; \
	VPCLMULQDQ $0x11, Z8, Z3, Z3; \
	VPTERNLOGQ $0x96, Z10, Z4, Z0; \
	VPTERNLOGQ $0x96, Z11, Z5, Z1; \
	VPTERNLOGQ $0x96, Z12, Z6, Z2; \
	VPTERNLOGQ $0x96, Z13, Z7, Z3

// FOLD128 adds four times 16 bytes, X10 to X13, to the folded ones before.
#define FOLD128 \
	FOLD1(X8, X0, X4, X10); \
	FOLD1(X8, X1, X5, X11); \
	FOLD1(X8, X2, X6, X12); \
	FOLD1(X8, X3, X7, X13); \
	VMOVDQU X10, X0; \
	VMOVDQU X11, X1; \
	VMOVDQU X12, X2; \
	VMOVDQU X13, X3

// func copySum512(dst, src unsafe.Pointer, n uintptr, state uint32) uint32
TEXT ·copySum512(SB), NOSPLIT, $0-36
	MOVQ dst+0(FP), DI
	MOVQ src+8(FP), SI
	MOVQ n+16(FP), CX
	MOVL state+24(FP), AX
	VBROADCASTI32X4 fold256<>(SB), Z8
	VMOVDQU64 (SI), Z0
	VMOVDQU64 64(SI), Z1
	VMOVDQU64 128(SI), Z2
	VMOVDQU64 192(SI), Z3
	VMOVNTDQ Z0, (DI)
	VMOVNTDQ Z1, 64(DI)
	VMOVNTDQ Z2, 128(DI)
	VMOVNTDQ Z3, 192(DI)
	VMOVD AX, X9 // the state is added to the first four bytes
	VPXORQ Z9, Z0, Z0
	ADDQ $256, SI
	ADDQ $256, DI
	SUBQ $256, CX
	JZ reduce512

loop512:
	VMOVDQU64 (SI), Z10
	VMOVDQU64 64(SI), Z11
	VMOVDQU64 128(SI), Z12
	VMOVDQU64 192(SI), Z13
	VMOVNTDQ Z10, (DI)
	VMOVNTDQ Z11, 64(DI)
	VMOVNTDQ Z12, 128(DI)
	VMOVNTDQ Z13, 192(DI)
	FOLD512
	ADDQ $256, SI
	ADDQ $256, DI
	SUBQ $256, CX
	JNZ loop512

reduce512:
	REDUCE512
	MOVL AX, ret+32(FP)
	RET

// func copySum128(dst, src unsafe.Pointer, n uintptr, state uint32) uint32
TEXT ·copySum128(SB), NOSPLIT, $0-36
	MOVQ dst+0(FP), DI
	MOVQ src+8(FP), SI
	MOVQ n+16(FP), CX
	MOVL state+24(FP), AX
	VMOVDQU fold64<>(SB), X8
	VMOVDQU (SI), X0
	VMOVDQU 16(SI), X1
	VMOVDQU 32(SI), X2
	VMOVDQU 48(SI), X3
	VMOVNTDQ X0, (DI)
	VMOVNTDQ X1, 16(DI)
	VMOVNTDQ X2, 32(DI)
	VMOVNTDQ X3, 48(DI)
	VMOVD AX, X9
	VPXOR X9, X0, X0
	ADDQ $64, SI
	ADDQ $64, DI
	SUBQ $64, CX
	JZ reduce128

loop128:
	VMOVDQU (SI), X10
	VMOVDQU 16(SI), X11
	VMOVDQU 32(SI), X12
	VMOVDQU 48(SI), X13
	VMOVNTDQ X10, (DI)
	VMOVNTDQ X11, 16(DI)
	VMOVNTDQ X12, 32(DI)
	VMOVNTDQ X13, 48(DI)
	FOLD128
	ADDQ $64, SI
	ADDQ $64, DI
	SUBQ $64, CX
	JNZ loop128

reduce128:
	REDUCE128
	MOVL AX, ret+32(FP)
	RET

// func sum512(src unsafe.Pointer, n uintptr, state uint32) uint32
TEXT ·sum512(SB), NOSPLIT, $0-28
	MOVQ src+0(FP), SI
	MOVQ n+8(FP), CX
	MOVL state+16(FP), AX
	VBROADCASTI32X4 fold256<>(SB), Z8
	VMOVDQU64 (SI), Z0
	VMOVDQU64 64(SI), Z1
	VMOVDQU64 128(SI), Z2
	VMOVDQU64 192(SI), Z3
	VMOVD AX, X9
	VPXORQ Z9, Z0, Z0
	ADDQ $256, SI
	SUBQ $256, CX
	JZ reduce512

loop512:
	PREFETCHT0 4096(SI) // the processor's own prefetching ends with each page
	PREFETCHT0 4160(SI)
	PREFETCHT0 4224(SI)
	PREFETCHT0 4288(SI)
	VMOVDQU64 (SI), Z10
	VMOVDQU64 64(SI), Z11
	VMOVDQU64 128(SI), Z12
	VMOVDQU64 192(SI), Z13
	FOLD512
	ADDQ $256, SI
	SUBQ $256, CX
	JNZ loop512

reduce512:
	REDUCE512
	MOVL AX, ret+24(FP)
	RET

// func sum128(src unsafe.Pointer, n uintptr, state uint32) uint32
TEXT ·sum128(SB), NOSPLIT, $0-28
	MOVQ src+0(FP), SI
	MOVQ n+8(FP), CX
	MOVL state+16(FP), AX
	VMOVDQU fold64<>(SB), X8
	VMOVDQU (SI), X0
	VMOVDQU 16(SI), X1
	VMOVDQU 32(SI), X2
	VMOVDQU 48(SI), X3
	VMOVD AX, X9
	VPXOR X9, X0, X0
	ADDQ $64, SI
	SUBQ $64, CX
	JZ reduce128

loop128:
	VMOVDQU (SI), X10
	VMOVDQU 16(SI), X11
	VMOVDQU 32(SI), X12
	VMOVDQU 48(SI), X13
	FOLD128
	ADDQ $64, SI
	SUBQ $64, CX
	JNZ loop128

reduce128:
	REDUCE128
	MOVL AX, ret+24(FP)
	RET

// func StoreFence()
TEXT ·StoreFence(SB), NOSPLIT, $0-0
	SFENCE
	RET
