package disk

import (
	"bytes"
	"encoding/binary"
	"slices"

	"github.com/kvagent/kvagent/pool"
)

// writeFooter ends a segment's file: copies of its headers in the order of the log, and the trailer. Only the keeper calls it, or
// Close after it.
func (d *dir) writeFooter(g *segment) error {
	headers := sorted(g.headers)
	n := footerBytes(len(headers) / headerBytes)
	p, err := mapMemory(n)
	if err != nil {
		return err
	}
	defer func() { _ = unmap(p) }() // it was mapped above
	copy(p, headers)
	t := trailer{count: uint32(len(headers) / headerBytes), headers: g.tail, sum: pool.Sum(0, headers)}
	t.encode(p[n-trailerBytes:n], g.nonce)
	d.budget.spend(n)
	if err := g.writeAt(p[:n], g.tail); err != nil {
		return err
	}
	d.s.count.written.Add(uint64(n))
	return g.truncate(g.tail + n)
}

// sorted puts headers in the order of their places: with several writers they were written in another.
func sorted(headers []byte) []byte {
	each := slices.Collect(slices.Chunk(headers, headerBytes))
	slices.SortFunc(each, func(a, b []byte) int {
		return int(int64(binary.LittleEndian.Uint32(a[104:])) - int64(binary.LittleEndian.Uint32(b[104:])))
	})
	return bytes.Join(each, nil)
}
