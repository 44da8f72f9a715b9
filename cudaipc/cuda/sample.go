//go:build cuda

package cuda

import (
	"runtime"
	"slices"
	"sync"

	"github.com/kvagent/kvagent/crc32c"
	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/driver"
	"github.com/kvagent/kvagent/pagefault"
)

// sampler sums the samples of all peers of a device, one after the other, in a role of its own.
// It reads the GPU's memory with plain synchronous copies; no lane, plan, pinned piece or ring is
// involved.
type sampler struct {
	d    *Device
	work *queue[sampling] // bounded by MaxCopies per peer
	role *driver.Role
}

// sampling is a sample that is in flight.
type sampling struct {
	*cudaipc.Flight
	of *peer
}

func startSampler(d *Device) (*sampler, error) {
	s := &sampler{d: d, work: newQueue[sampling]()}
	var err error
	if s.role, err = driver.StartRole(d.ctx); err != nil {
		return nil, err
	}
	s.role.Begin(s.run)
	return s, nil
}

// run sums samples until the sampler is closed. On a lost device none is known to have ended.
func (s *sampler) run() {
	scratch := make([]byte, cudaipc.SampleScratch)
	for {
		f, ok := s.work.take(true)
		if !ok {
			return
		}
		f.Sum(func(from cudaipc.Stretch, into []byte) error { return s.read(f.of, from, into) }, scratch)
		if s.d.alive() != nil {
			return
		}
		f.Finish()
	}
}

// read copies a stretch from the GPU. Bytes read around the death of the peer are not trusted.
func (s *sampler) read(p *peer, from cudaipc.Stretch, into []byte) error {
	if err := s.d.alive(); err != nil {
		return err
	}
	if p.exiting() {
		return cudaipc.ErrPeerDead
	}
	if err := s.d.judge(driver.Read(into, driver.Addr(from.In.Addr+from.Off))); err != nil {
		return err
	}
	if p.exiting() {
		return cudaipc.ErrPeerDead
	}
	return nil
}

// close ends the sampler after the samples that it has.
func (s *sampler) close() {
	if s != nil {
		s.work.close()
		s.role.Close()
	}
}

// Sum checks a sample and hands it to the sampler.
func (p *peer) Sum(s *cudaipc.Sample) (cudaipc.Ticket, error) {
	if err := p.d.alive(); err != nil {
		return nil, err
	}
	return p.StartSum(s, func(f *cudaipc.Flight) error {
		p.d.sampler.work.put(sampling{f, p})
		return nil
	})
}

// Limits of the summing.
const (
	maxSummers  = 16      // goroutines, at most: one core sums 5 to 9 GiB/s from memory, a copy engine moves 25 to 50
	sumsPerPart = 1 << 20 // bytes, about, that one of them takes at a time
	// sumPiece is how many bytes are summed without a place at which the runtime can stop the
	// goroutine: all others would wait for it, and the copies with them.
	sumPiece = 64 << 10
)

// summers checksum blocks in the arena: those of a gather as they arrive, those of a scatter
// while they are copied. The copy engines do not wait for them.
type summers struct {
	arena []byte
	parts *queue[sumPart] // bounded by MaxCopies per peer, and MaxCopyRuns per copy
	ended sync.WaitGroup
}

// sumPart is some blocks of a flight.
type sumPart struct {
	f        *flight
	from, to int // blocks
	runs     int // the first block's first run
}

func startSummers(arena []byte) *summers {
	s := &summers{arena: arena, parts: newQueue[sumPart]()}
	// With half of 16 processors saves beside loads got 55 to 63 GiB/s on an H200, with 12 of them
	// 71 to 74.
	n := min(maxSummers, max(1, 3*runtime.GOMAXPROCS(0)/4))
	for range n {
		s.ended.Go(s.run)
	}
	return s
}

// sumProgress is how many blocks of a flight the summers were given.
type sumProgress struct {
	block, run int    // the first that were not
	bytes      uint64 // of those before
}

// enqueue gives the summers those blocks that lie within the first bytes of a flight and are new
// to them. The last of them ends the flight's wait for its sums.
func (s *summers) enqueue(f *flight, bytes uint64) {
	c, at := f.Copy, &f.summed
	part, size := sumPart{f: f, from: at.block, runs: at.run}, uint64(0)
	for at.block < len(c.Blocks) {
		n, runs := uint64(0), int(c.Blocks[at.block].Runs)
		for i := range runs {
			n += uint64(c.Runs[at.run+i].Len)
		}
		if n > bytes-at.bytes {
			break
		}
		*at = sumProgress{at.block + 1, at.run + runs, at.bytes + n}
		if size += n; size >= sumsPerPart {
			s.put(part, at.block)
			part, size = sumPart{f: f, from: at.block, runs: at.run}, 0
		}
	}
	if part.from < at.block {
		s.put(part, at.block)
	}
}

func (s *summers) put(part sumPart, to int) {
	part.to = to
	part.f.waits.Add(1)
	s.parts.put(part)
}

func (s *summers) run() {
	for {
		part, ok := s.parts.take(true)
		if !ok {
			return
		}
		s.sum(part)
		part.f.passed()
	}
}

func (s *summers) sum(part sumPart) {
	c, run := part.f.Copy, part.runs
	for i := part.from; i < part.to; i++ {
		state := c.Blocks[i].Seed
		for end := run + int(c.Blocks[i].Runs); run < end; {
			off, n := c.Runs[run].ArenaOff, int64(0)
			for ; run < end && c.Runs[run].ArenaOff == off+n; run++ {
				n += int64(c.Runs[run].Len)
			}
			if err := pagefault.Guard(s.arena, nil, func() { state = sumOf(s.arena[off:off+n], state) }); err != nil {
				part.f.mark(i, err)
			}
		}
		part.f.End.Sums[i] = state
	}
}

// sumOf continues a sum over bytes of the arena.
func sumOf(b []byte, state uint32) uint32 {
	for piece := range slices.Chunk(b, sumPiece) {
		state = crc32c.Update(state, piece)
	}
	return state
}

// close ends the summers after the parts that they have.
func (s *summers) close() {
	s.parts.close()
	s.ended.Wait()
}
