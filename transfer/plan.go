package transfer

import (
	"fmt"
	"hash/crc32"
	"math"

	"github.com/kvagent/kvagent/cudaipc"
)

// plan is a group's layout with adjacent segments merged, so that a block needs few runs.
type plan struct {
	blocks   uint32
	bytes    uint32 // of one block
	segments []Segment
}

// makePlan makes the plan of a layout, of which a block must have want bytes. The device checks for
// each run that the region is large enough.
func makePlan(g *GroupLayout, want uint32) (plan, error) {
	p := plan{blocks: g.NumBlocks, bytes: want}
	var total uint64
	for i := range g.Segments {
		total += uint64(g.Segments[i].Bytes)
		p.add(&g.Segments[i])
	}
	if total != uint64(want) || total == 0 {
		return p, fmt.Errorf("segments: %d bytes a block, the space has %d: %w", total, want, ErrInvalid)
	}
	return p, nil
}

// add appends a segment, or makes the last one longer if this one follows it in every block.
func (p *plan) add(s *Segment) {
	if n := len(p.segments); n > 0 {
		last := &p.segments[n-1]
		together := uint64(last.Bytes) + uint64(s.Bytes)
		if last.Region == s.Region && last.Stride == s.Stride && last.Offset+uint64(last.Bytes) == s.Offset &&
			together <= math.MaxUint32 {
			last.Bytes = uint32(together)
			return
		}
	}
	p.segments = append(p.segments, *s)
}

// runs appends the runs of one block whose slot begins at off in the arena.
func (p *plan) runs(to []cudaipc.Run, block uint32, off int64) []cudaipc.Run {
	for i := range p.segments {
		s := &p.segments[i]
		to = append(to, cudaipc.Run{Region: s.Region, RegionOff: s.Offset + uint64(block)*s.Stride, ArenaOff: off,
			Len: s.Bytes})
		off += int64(s.Bytes)
	}
	return to
}

// Segment locates a piece of every block of a group: that of block b is at Offset + b*Stride.
type Segment = cudaipc.Piece

// GroupLayout is one KV cache group of a worker: a block is the pieces of its segments in order.
type GroupLayout struct {
	NumBlocks uint32
	Segments  []Segment
}

// Layout is a worker's KV cache; index is the group's number.
type Layout struct{ Groups []GroupLayout }

// combine returns the CRC-32C of some bytes and those after them: before is that of the first, in
// whatever state it began, after that of the others alone, and shift is shiftOf their number.
func combine(before, after, shift uint32) uint32 { return multiply(shift, before) ^ after }

// shiftOf returns the polynomial x^(8n) modulo CRC-32C's, with the lowest power in the highest bit,
// as in zlib's crc32_combine.
func shiftOf(n uint32) uint32 {
	power, square := uint32(1)<<31, uint32(1)<<(31-8)
	for ; n > 0; n >>= 1 {
		if n&1 != 0 {
			power = multiply(power, square)
		}
		square = multiply(square, square)
	}
	return power
}

// multiply returns the product of two such polynomials.
func multiply(a, b uint32) (product uint32) {
	for ; a != 0; a <<= 1 {
		if a>>31 != 0 {
			product ^= b
		}
		low := b & 1
		b >>= 1
		if low != 0 {
			b ^= crc32.Castagnoli
		}
	}
	return product
}
