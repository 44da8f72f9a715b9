package host

import (
	"github.com/kvagent/kvagent/crc32c"
	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/pagefault"
)

// stream does the copies of one peer and direction one after the other, on a goroutine of its own.
// Its peer owns it: peer.close ends it and waits.
type stream struct {
	peer  *peer
	work  chan hostCopy
	ended chan struct{}
	arena []byte
}

// hostCopy is a copy in flight.
type hostCopy struct {
	*cudaipc.Flight
	copy *cudaipc.Copy
}

func startStream(p *peer, arena []byte) *stream {
	s := &stream{peer: p, work: make(chan hostCopy, cudaipc.MaxCopies), ended: make(chan struct{}), arena: arena}
	go s.run()
	return s
}

func (s *stream) run() {
	defer close(s.ended)
	for f := range s.work {
		s.copy(f)
		crc32c.StoreFence()
		f.Finish()
	}
}

func (s *stream) close() {
	close(s.work)
	<-s.ended
}

// copy copies all blocks. A failed block does not stop the next ones.
func (s *stream) copy(f hostCopy) {
	c := f.copy
	if c.Sum {
		f.End.Sums = make([]uint32, len(c.Blocks))
	}
	runs := c.Runs
	for i := range c.Blocks {
		b := &c.Blocks[i]
		sum, err := s.block(c.Dir, runs[:b.Runs], b.Seed, c.Sum)
		runs = runs[b.Runs:]
		if c.Sum {
			f.End.Sums[i] = sum
		}
		if err != nil {
			f.End.MarkBad(i, len(c.Blocks), err)
		}
	}
}

// block moves the runs of one block and returns the checksum.
func (s *stream) block(dir cudaipc.Direction, runs []cudaipc.Run, sum uint32, sums bool) (uint32, error) {
	for len(runs) > 0 {
		r := s.peer.Regions[runs[0].Region]
		n := 1
		for n < len(runs) && runs[n].Region == runs[0].Region {
			n++
		}
		var err error
		if r.Mem != nil {
			sum, err = s.mapped(r.Mem, dir, runs[:n], sum, sums || crc32c.CopiesFast())
		} else {
			sum, err = s.remote(r, dir, runs[:n], sum, sums)
		}
		if err != nil {
			return sum, err
		}
		runs = runs[n:]
	}
	return sum, nil
}

// mapped moves runs between a mapped region and the arena. The fast forms sum for free, and so
// always do.
func (s *stream) mapped(mem []byte, dir cudaipc.Direction, runs []cudaipc.Run, sum uint32, sums bool) (uint32, error) {
	err := pagefault.Guard(mem, s.arena, func() {
		for i := range runs {
			run := &runs[i]
			there := mem[run.RegionOff : run.RegionOff+uint64(run.Len)]
			here := s.arena[run.ArenaOff : run.ArenaOff+int64(run.Len)]
			dst, src := here, there
			if dir == cudaipc.Scatter {
				dst, src = there, here
			}
			if sums {
				sum = crc32c.Copy(dst, src, sum)
			} else {
				copy(dst, src)
			}
		}
	})
	return sum, err
}
