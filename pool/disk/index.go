package disk

import (
	"errors"
	"fmt"
	"math/bits"
	"sync"
	"unsafe"
)

// tag represents a key in memory: 128 bits of a hash with a secret seed of this process, so that
// collisions cannot be made on purpose. A read compares the whole key on the disk in any case.
type tag struct{ hi, lo uint64 }

// place is the position of a block.
type place struct {
	segment uint32 // handle; 0 is no segment
	at      uint32 // of the header, in grains
	length  uint32 // bytes of the block
}

func (p *place) off() int64 { return int64(p.at) * grain }

// same reports whether both are the place of one record.
func (p *place) same(q place) bool { return p.segment == q.segment && p.at == q.at }

// cell is one block of the index. It has 32 bytes, in a table that is between 4/7 and 6/7 full: 38
// to 56 bytes per block.
type cell struct {
	tag
	place
}

const (
	indexShards = 256 // each with a lock and a table of its own, which grows separately
	shardBits   = 8
	firstCells  = pageBytes / int(unsafe.Sizeof(cell{}))
	fullNum     = 6 // a table grows by half when it is fuller than this
	fullDen     = 7
)

// index maps tags to places. Its tables are off the Go heap.
type index struct {
	shard [indexShards]indexShard
}

// indexShard uses open addressing with linear probing; removal moves entries nearer to their homes.
type indexShard struct {
	mu    sync.Mutex
	raw   []byte
	cells []cell
	n     int
}

var errIndexFull = errors.New("disk: no memory for the index")

func (x *index) close() error {
	var err error
	for i := range x.shard {
		s := &x.shard[i]
		s.mu.Lock()
		err = errors.Join(err, unmap(s.raw))
		s.raw, s.cells, s.n = nil, nil, 0
		s.mu.Unlock()
	}
	return err
}

// size returns the number of blocks and the memory of their tables.
func (x *index) size() (blocks, bytes int64) {
	for i := range x.shard {
		s := &x.shard[i]
		s.mu.Lock()
		blocks, bytes = blocks+int64(s.n), bytes+int64(len(s.raw))
		s.mu.Unlock()
	}
	return blocks, bytes
}

func (x *index) lock(t tag) *indexShard {
	s := &x.shard[t.hi>>(64-shardBits)]
	s.mu.Lock()
	return s
}

func (x *index) get(t tag) (place, bool) {
	s := x.lock(t)
	defer s.mu.Unlock()
	if i, ok := s.find(t); ok {
		return s.cells[i].place, true
	}
	return place{}, false
}

func (x *index) put(t tag, p place) error {
	s := x.lock(t)
	defer s.mu.Unlock()
	i, ok := s.find(t)
	if !ok && (s.n+1)*fullDen > len(s.cells)*fullNum {
		if err := s.grow(); err != nil {
			return err
		}
		i, _ = s.find(t)
	}
	if !ok {
		s.n++
	}
	s.cells[i] = cell{t, p}
	return nil
}

func (x *index) remove(t tag) {
	s := x.lock(t)
	defer s.mu.Unlock()
	if i, ok := s.find(t); ok {
		s.removeAt(i)
	}
}

// removeIf removes a block that is still at p.
func (x *index) removeIf(t tag, p place) bool {
	s := x.lock(t)
	defer s.mu.Unlock()
	i, ok := s.find(t)
	if !ok || !s.cells[i].same(p) {
		return false
	}
	s.removeAt(i)
	return true
}

// removeSegments removes all blocks of some segments. It examines every block of the index.
func (x *index) removeSegments(handles map[uint32]bool) (n int) {
	for k := range x.shard {
		s := &x.shard[k]
		s.mu.Lock()
		for i := 0; i < len(s.cells); {
			if handles[s.cells[i].segment] {
				s.removeAt(i) // another cell may have moved here
				n++
			} else {
				i++
			}
		}
		s.mu.Unlock()
	}
	return n
}

// home returns the home of a tag, by the bits that did not choose the shard.
func (s *indexShard) home(t tag) int {
	hi, _ := bits.Mul64(t.hi<<shardBits, uint64(len(s.cells)))
	return int(hi)
}

// find returns the cell of a tag, or the empty one where it would be put. A table with cells always
// has an empty one.
func (s *indexShard) find(t tag) (int, bool) {
	if len(s.cells) == 0 {
		return 0, false
	}
	for i := s.home(t); ; i = s.after(i) {
		if s.cells[i].segment == 0 {
			return i, false
		}
		if s.cells[i].tag == t {
			return i, true
		}
	}
}

func (s *indexShard) after(i int) int {
	if i++; i < len(s.cells) {
		return i
	}
	return 0
}

// removeAt empties a cell, and moves the cells after it nearer to their homes.
func (s *indexShard) removeAt(i int) {
	s.n--
	for j := s.after(i); s.cells[j].segment != 0; j = s.after(j) {
		if home := s.home(s.cells[j].tag); s.distance(home, j) >= s.distance(i, j) {
			s.cells[i] = s.cells[j]
			i = j
		}
	}
	s.cells[i] = cell{}
}

func (s *indexShard) distance(from, to int) int {
	if to -= from; to < 0 {
		to += len(s.cells)
	}
	return to
}

func (s *indexShard) grow() error {
	n := max(firstCells, len(s.cells)*3/2)
	raw, err := mapPages(roundUp(int64(n)*int64(unsafe.Sizeof(cell{})), pageBytes))
	if err != nil {
		return fmt.Errorf("%w: %w", errIndexFull, err)
	}
	old, oldRaw := s.cells, s.raw
	s.raw, s.cells = raw, unsafe.Slice(
		(*cell)(unsafe.Pointer(unsafe.SliceData(raw))), len(raw)/int(unsafe.Sizeof(cell{})),
	)
	for i := range old {
		if old[i].segment != 0 {
			j, _ := s.find(old[i].tag)
			s.cells[j] = old[i]
		}
	}
	return unmap(oldRaw)
}
