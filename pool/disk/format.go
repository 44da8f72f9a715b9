package disk

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/kvagent/kvagent/pool"
)

// docs/DISK.md describes the format. A change of any of these numbers is a new version.
const (
	formatVersion = 1

	pageBytes    = 4096 // writes begin and end on one
	grain        = 64   // records begin on one
	headerBytes  = 128
	trailerBytes = 64

	headerMagic  = 0x4352564b // "KVRC"
	trailerMagic = 0x5446564b // "KVFT"
)

// errFormat is for a directory that a later version of this program wrote.
var errFormat = errors.New("written by a later version")

// kindBlock is the kind of a record.
const kindBlock = 1

// header precedes each record's bytes, and is repeated in its segment's footer.
type header struct {
	key    pool.Key
	parent pool.Hash
	length uint32 // bytes after the header
	sum    uint32 // pool.Sum of them from key.Seed(length)
	off    int64  // where in the segment the header is
	born   uint32 // Unix time in seconds
}

func (h *header) size() int64 { return recordBytes(int(h.length)) }

func recordBytes(length int) int64 { return roundUp(headerBytes+int64(length), grain) }

func roundUp(n, to int64) int64 { return (n + to - 1) / to * to }

// encode fills p, of headerBytes. The nonce is the segment's: bytes of a block that look like a
// header do not have its checksum.
func (h *header) encode(p []byte, nonce uint64) {
	clear(p[:headerBytes])
	le := binary.LittleEndian
	le.PutUint32(p, headerMagic)
	p[8], p[9], p[10], p[11], p[12] = kindBlock, h.key.Group, h.key.Shard, h.key.Hash.Len, h.parent.Len
	copy(p[16:32], h.key.Space[:])
	copy(p[32:64], h.key.Hash.Bytes[:])
	copy(p[64:96], h.parent.Bytes[:])
	le.PutUint32(p[96:], h.length)
	le.PutUint32(p[100:], h.sum)
	le.PutUint32(p[104:], uint32(h.off/grain))
	le.PutUint32(p[108:], h.born)
	le.PutUint32(p[4:], salted(nonce, p[8:headerBytes]))
}

// decode decodes a header; it returns false unless p is a valid header of this segment.
func (h *header) decode(p []byte, nonce uint64) bool {
	le := binary.LittleEndian
	if le.Uint32(p) != headerMagic || le.Uint32(p[4:]) != salted(nonce, p[8:headerBytes]) || p[8] != kindBlock {
		return false
	}
	h.key.Group, h.key.Shard, h.key.Hash.Len, h.parent.Len = p[9], p[10], p[11], p[12]
	copy(h.key.Space[:], p[16:32])
	copy(h.key.Hash.Bytes[:], p[32:64])
	copy(h.parent.Bytes[:], p[64:96])
	h.length, h.sum = le.Uint32(p[96:]), le.Uint32(p[100:])
	h.off, h.born = int64(le.Uint32(p[104:]))*grain, le.Uint32(p[108:])
	return valid(&h.key) && h.parent.Len <= pool.MaxHashLen
}

func salted(nonce uint64, p []byte) uint32 {
	var salt [8]byte
	binary.LittleEndian.PutUint64(salt[:], nonce)
	return pool.Sum(pool.Sum(0, salt[:]), p)
}

// trailer is the end of a closed segment's file, after a copy of all its headers.
type trailer struct {
	count   uint32 // headers
	headers int64  // where they begin
	sum     uint32 // pool.Sum of them from 0
}

func (t *trailer) encode(p []byte, nonce uint64) {
	clear(p[:trailerBytes])
	le := binary.LittleEndian
	le.PutUint32(p, trailerMagic)
	le.PutUint32(p[8:], formatVersion)
	le.PutUint32(p[12:], t.count)
	le.PutUint64(p[16:], uint64(t.headers))
	le.PutUint32(p[24:], t.sum)
	le.PutUint32(p[4:], salted(nonce, p[8:trailerBytes]))
}

// decode returns false unless p is the trailer of this segment's file, which has size bytes.
func (t *trailer) decode(p []byte, nonce uint64, size int64) bool {
	le := binary.LittleEndian
	if le.Uint32(p) != trailerMagic || le.Uint32(p[4:]) != salted(nonce, p[8:trailerBytes]) ||
		le.Uint32(p[8:]) != formatVersion {
		return false
	}
	t.count, t.headers, t.sum = le.Uint32(p[12:]), int64(le.Uint64(p[16:])), le.Uint32(p[24:])
	return t.headers >= 0 && t.headers%pageBytes == 0 && t.headers+footerBytes(int(t.count)) == size
}

// footerBytes returns the size of the footer of n records, headers and trailer, in whole pages.
func footerBytes(n int) int64 { return roundUp(int64(n)*headerBytes+trailerBytes, pageBytes) }

// segmentName returns a file name with the version of the format, the place in the log, and the
// nonce of the checksums.
func segmentName(id, nonce uint64) string {
	return fmt.Sprintf("v%d-%016x-%016x.seg", formatVersion, id, nonce)
}

// parseName parses a segment's file name, of any version; ok is false for another file.
func parseName(name string) (version int, id, nonce uint64, ok bool) {
	n, err := fmt.Sscanf(name, "v%d-%016x-%016x.seg", &version, &id, &nonce)
	if err != nil || n != 3 {
		return 0, 0, 0, false
	}
	ok = name == fmt.Sprintf("v%d-%016x-%016x.seg", version, id, nonce)
	return version, id, nonce, ok
}

// copyStep is so small that copied bytes are in the first-level cache when they are summed.
const copyStep = 16 << 10

// copySum copies src to dst, of the same length, and returns pool.Sum of state and the copy.
func copySum(state uint32, dst, src []byte) uint32 {
	for len(src) > 0 {
		n := copy(dst[:min(copyStep, len(dst))], src)
		state = pool.Sum(state, dst[:n])
		dst, src = dst[n:], src[n:]
	}
	return state
}

// segment is one file of a log.
type segment struct {
	*file
	id, nonce uint64
	handle    uint32 // in the index, from 1; not reused in this process

	refs atomic.Int32 // one of the log, and one for each read; the last one closes the file

	// The fields below are guarded by the directory's lock.

	taken   int64  // bytes on the disk, as counted against the limit
	tail    int64  // an open segment: where the next batch begins
	records int    // an open segment: reserved in it, whose headers will be in the footer
	headers []byte // an open segment: of the records written, in any order
	pending int    // batches not yet written
	closed  bool   // it has a footer, or will never have one
}

// hold keeps the file open for a read; false if it is closed already.
func (g *segment) hold() bool {
	for {
		n := g.refs.Load()
		if n == 0 {
			return false
		}
		if g.refs.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

func (g *segment) release() error {
	if g.refs.Add(-1) == 0 {
		return g.close()
	}
	return nil
}

// room reports whether a further record of size bytes, in a batch that begins at tail and has used
// bytes so far, leaves room for the footer.
func (g *segment) room(used, size, limit int64) bool {
	return g.tail+roundUp(used+size, pageBytes)+footerBytes(g.records+1) <= limit
}

// handles finds segments by their numbers in the index, for all directories together.
type handles struct {
	last atomic.Uint32
	all  sync.Map // handle to *segment
}

func (h *handles) add(g *segment) {
	g.handle = h.last.Add(1)
	h.all.Store(g.handle, g)
}

// hold returns a segment with its file held open, or nil.
func (h *handles) hold(handle uint32) *segment {
	if g, ok := h.all.Load(handle); ok && g.(*segment).hold() {
		return g.(*segment)
	}
	return nil
}

// writeFooter ends a segment's file: copies of its headers in the order of the log, and the
// trailer. Only the keeper calls it, or Close after it.
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
	if err := g.writeAt(p[:n], g.tail); err != nil {
		return err
	}
	d.s.add(writtenBytes, int(n))
	return g.truncate(g.tail + n)
}

// sorted sorts headers by their places: several writers write them in another order.
func sorted(headers []byte) []byte {
	each := slices.Collect(slices.Chunk(headers, headerBytes))
	slices.SortFunc(each, func(a, b []byte) int {
		return int(int64(binary.LittleEndian.Uint32(a[104:])) - int64(binary.LittleEndian.Uint32(b[104:])))
	})
	return bytes.Join(each, nil)
}
