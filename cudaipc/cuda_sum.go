//go:build cuda

package cudaipc

import (
	"hash/crc32"
	"runtime"
	"sync"
)

// Limits of the summing.
const (
	maxSummers  = 4       // goroutines
	sumsPerPart = 1 << 20 // bytes, about, that one of them takes at a time
)

// summers make the checksums of blocks from the arena: of a gather when its bytes are there, of a scatter while they are copied. The
// copy engines do not wait for them.
type summers struct {
	arena []byte
	parts *queue[sumPart] // bounded by MaxCopies per peer, and MaxCopyRuns per copy
	ended sync.WaitGroup
}

// sumPart is some blocks of a flight.
type sumPart struct {
	f        *cudaFlight
	from, to int // blocks
	runs     int // the first block's first run
}

func startSummers(arena []byte) *summers {
	s := &summers{arena: arena, parts: newQueue[sumPart]()}
	n := min(maxSummers, max(1, runtime.GOMAXPROCS(0)/2))
	for range n {
		s.ended.Go(s.run)
	}
	return s
}

// start gives all blocks of a flight to the summers. The last of them ends the flight's wait for them.
func (s *summers) start(f *cudaFlight) {
	c := f.copy
	part, bytes, run := sumPart{f: f}, uint64(0), 0
	for i := range c.Blocks {
		for range c.Blocks[i].Runs {
			bytes += uint64(c.Runs[run].Len)
			run++
		}
		if bytes >= sumsPerPart || i == len(c.Blocks)-1 {
			part.to = i + 1
			f.waits.Add(1)
			s.parts.put(part)
			part, bytes = sumPart{f: f, from: i + 1, runs: run}, 0
		}
	}
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
	c, run := part.f.copy, part.runs
	for i := part.from; i < part.to; i++ {
		state := c.Blocks[i].Seed
		for range c.Blocks[i].Runs {
			r := &c.Runs[run]
			state = crc32.Update(state, castagnoli, s.arena[r.ArenaOff:r.ArenaOff+int64(r.Len)])
			run++
		}
		part.f.end.Sums[i] = state
	}
}

// close ends the summers behind what they were given.
func (s *summers) close() {
	s.parts.close()
	s.ended.Wait()
}
