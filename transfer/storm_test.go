package transfer

import (
	"bytes"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/pool"
)

// storm is an engine that does everything at once: saves after kernels that run late, loads,
// cancels, and revocations after which it overwrites the block at once. It checks every block that
// is loaded.
type storm struct {
	*station
	random *rand.Rand
	epoch  *atomic.Uint32 // of the space; another storm may raise it
	reset  *sync.Mutex    // held while it is raised

	free  []uint32
	words []uint32 // revocation words not in use
	step  uint64
	next  uint64
	jobs  map[uint64]*stormJob
	seen  [Off + 1]int
}

type stormJob struct {
	job    Job
	number []int // of each hash
	taken  bool  // the engine took the blocks back already: a revoked save
}

const stormHashes = 100 // more than the pool holds

// seedOf binds the bytes to the epoch: those of another epoch are wrong bytes.
func seedOf(number int, epoch uint32) uint64 { return uint64(epoch)<<20 + uint64(number) }

// TestStorm expects every job to be completed once, no wrong byte to be delivered, and nothing to
// be left.
func TestStorm(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	n := newNode(t, 48)
	epoch, reset := &atomic.Uint32{}, &sync.Mutex{}
	epoch.Store(1)
	var engines sync.WaitGroup
	for i := range 3 {
		s := &storm{
			station: n.join(t, func(c *Config) {
				c.Limits = DefaultLimits
				c.Limits.Queue, c.Limits.BatchBytes = 8, 2*blockSize
			}),
			random: rand.New(rand.NewPCG(seed, uint64(i))), epoch: epoch, reset: reset, jobs: map[uint64]*stormJob{},
			words: []uint32{0, 1, 2, 3, 4, 5, 6, 7},
		}
		for b := range uint32(blocks) {
			s.free = append(s.free, b)
		}
		engines.Go(s.rage)
	}
	engines.Wait()
}

func (s *storm) rage() {
	for range 800 {
		switch s.random.IntN(10) {
		case 0, 1, 2, 3:
			s.start(Save)
		case 4, 5, 6, 7:
			s.start(Load)
		case 8:
			s.disturb()
		default:
			if s.random.IntN(20) == 0 {
				s.raise()
			}
		}
		for len(s.jobs) > 12 || (len(s.jobs) > 0 && s.random.IntN(3) == 0) {
			s.take(s.completion())
		}
	}
	if s.random.IntN(2) == 0 {
		s.worker.Close()
	}
	for len(s.jobs) > 0 {
		s.take(s.completion())
	}
	s.worker.Close()
	if s.seen[pool.OK] == 0 || len(s.done) > 0 ||
		s.seen[Failed]+s.seen[TimedOut]+s.seen[pool.Corrupt]+s.seen[pool.Invalid] > 0 {
		s.t.Errorf("statuses %v, %d completions too many", s.seen, len(s.done))
	}
}

// start begins a job. The bytes that a save stores are written by a kernel that runs after the job
// was submitted.
func (s *storm) start(kind Kind) {
	n := 1 + s.random.IntN(6)
	s.next++
	j := &stormJob{job: Job{ID: s.next, Kind: kind, Epoch: s.epoch.Load(), Event: uint32(s.next % 16),
		Revoke: cudaipc.None}}
	first := s.random.IntN(stormHashes)
	sec := section(first, n, 0)
	for i := range sec.Blocks {
		k := s.random.IntN(len(s.free))
		sec.Blocks[i] = s.free[k]
		s.free[k] = s.free[len(s.free)-1]
		s.free = s.free[:len(s.free)-1]
		j.number = append(j.number, first+i)
	}
	j.job.Sections = []Section{sec}
	s.step++
	j.job.Step = s.step
	if kind == Save && len(s.words) > 0 {
		j.job.Revoke = s.words[0]
	}
	late := time.Duration(s.random.IntN(3)) * 100 * time.Microsecond
	s.stream.Launch(func() {
		time.Sleep(late) // the subject: kernels that end in time, and those that a job has to wait for
		for i, b := range sec.Blocks {
			s.write(b, seedOf(j.number[i], j.job.Epoch)+uint64(kind)<<40)
		}
	})
	s.stream.SetStep(s.step)
	s.stream.Record(j.job.Event)
	if err := s.worker.Submit(j.job); err != nil {
		s.stream.Synchronize()
		s.free = append(s.free, sec.Blocks...)
		return
	}
	if j.job.Revoke != cudaipc.None {
		s.words = s.words[1:]
	}
	s.jobs[j.job.ID] = j
}

// disturb cancels a job, or revokes a save and takes its blocks back at once.
func (s *storm) disturb() {
	for id, j := range s.jobs {
		if j.job.Revoke == cudaipc.None || s.random.IntN(2) == 0 {
			s.worker.Cancel(id)
			return
		}
		if !j.taken {
			s.engine.Revoke(j.job.Revoke)
			s.stream.Synchronize()
			for _, b := range j.job.Sections[0].Blocks {
				s.write(b, 7)
			}
			s.free = append(s.free, j.job.Sections[0].Blocks...)
			j.taken = true
		}
		return
	}
}

func (s *storm) raise() {
	s.reset.Lock()
	defer s.reset.Unlock()
	epoch, err := s.pool.ResetSpace(s.space)
	if err != nil {
		s.t.Error(err)
	}
	s.epoch.Store(epoch)
}

func (s *storm) take(c Completion) {
	j := s.jobs[c.Job]
	if j == nil {
		s.t.Errorf("job %d was completed twice, or never submitted", c.Job)
		return
	}
	delete(s.jobs, c.Job)
	for i, status := range c.Status {
		s.seen[status]++
		block := j.job.Sections[0].Blocks[i]
		if c.Kind == Load && status == pool.OK &&
			!bytes.Equal(s.read(block), bytesOf(seedOf(j.number[i], j.job.Epoch))) {
			s.t.Errorf("job %d: hash %d was delivered with wrong bytes", c.Job, j.number[i])
		}
	}
	if j.job.Revoke != cudaipc.None {
		s.engine.ClearRevoke(j.job.Revoke)
		s.words = append(s.words, j.job.Revoke)
	}
	if !j.taken {
		s.stream.Synchronize() // the kernel of a job that was cancelled may run still
		s.free = append(s.free, j.job.Sections[0].Blocks...)
	}
}
