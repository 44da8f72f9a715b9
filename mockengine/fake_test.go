package mockengine

import (
	"encoding/binary"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/pool/pooltest"
)

// fakeAgent is an agent in memory, one goroutine per job. It keeps the rules of the real one
// (event, revocation, fence) unless told otherwise, and takes its time.
type fakeAgent struct {
	t       *testing.T
	w       *Workers
	words   [][]byte // each rank's words, mapped as an agent does
	events  chan Event
	pending sync.WaitGroup
	end     chan struct{}

	lag    time.Duration // longest pause before a job is done
	lose   float64       // share of loaded blocks that are missing
	busy   float64       // share of saved blocks that are answered busy
	refuse float64       // share of jobs that are not taken
	deaf   bool          // no fence for loads until open
	late   chan struct{} // broken: writes to a load's blocks after its cancel was acknowledged, when closed
	noWait bool          // broken: does not wait for the step

	mu struct {
		sync.Mutex
		rng      *rand.Rand
		stored   map[cacheKey][][]byte // bytes by rank
		cancel   map[uint64]chan struct{}
		leases   map[uint64]bool
		lease    uint64
		asked    int
		held     []func()
		saves    []Job // as submitted
		loads    []Job
		revoked  int
		released int
	}
}

func newFakeAgent(t *testing.T, w *Workers, seed uint64) *fakeAgent {
	f := &fakeAgent{t: t, w: w, events: make(chan Event, 1<<16), end: make(chan struct{})}
	f.mu.rng = rand.New(rand.NewPCG(seed, 9))
	f.mu.stored, f.mu.cancel, f.mu.leases = map[cacheKey][][]byte{}, map[uint64]chan struct{}{}, map[uint64]bool{}
	for _, r := range w.ranks {
		region, _ := r.SyncDesc()
		mem, err := unix.Mmap(region.FD, 0, int(region.Size), unix.PROT_READ, unix.MAP_SHARED)
		if err != nil {
			t.Fatal(err)
		}
		f.words = append(f.words, mem)
	}
	t.Cleanup(func() {
		close(f.end)
		f.pending.Wait()
		for _, m := range f.words {
			unix.Munmap(m)
		}
	})
	return f
}

func (f *fakeAgent) Events() <-chan Event { return f.events }

func (f *fakeAgent) Ask(q *Question) Answer {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.mu.asked++
	n := 0
	for i, h := range q.Hashes {
		end := (i + 1) * f.w.cfg.BlockTokens
		if end <= q.Own || f.has(h, end) {
			n = end
			continue
		}
		break
	}
	if n <= q.Own {
		return Answer{}
	}
	f.mu.lease++
	f.mu.leases[f.mu.lease] = true
	return Answer{Tokens: n, Lease: Lease{Attachment: 1, Number: f.mu.lease}}
}

// has says whether every group that has a block ending there has it stored.
func (f *fakeAgent) has(h Hash, end int) bool {
	for g := range f.w.cfg.Groups {
		if end%f.w.cfg.blockTokens(g) == 0 && f.mu.stored[cacheKey{uint8(g), h}] == nil {
			return false
		}
	}
	return true
}

func (f *fakeAgent) Release(l Lease) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.mu.leases[l.Number] {
		f.t.Errorf("lease %d released twice, or never given", l.Number)
	}
	delete(f.mu.leases, l.Number)
	f.mu.released++
}

func (f *fakeAgent) Cancel(job uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if c := f.mu.cancel[job]; c != nil {
		close(c)
		f.mu.cancel[job] = nil
	}
}

func (f *fakeAgent) Submit(j *Job) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.mu.rng.Float64() < f.refuse {
		return false
	}
	job := *j
	cancelled := make(chan struct{})
	f.mu.cancel[job.ID] = cancelled
	if job.Kind == SaveJob {
		f.mu.saves = append(f.mu.saves, job)
	} else {
		f.mu.loads = append(f.mu.loads, job)
	}
	lag := time.Duration(0)
	if f.lag > 0 {
		lag = time.Duration(f.mu.rng.Int64N(int64(f.lag)))
	}
	run := func() {
		f.pending.Add(1)
		go func() {
			defer f.pending.Done()
			f.run(&job, lag, cancelled)
		}()
	}
	if f.deaf && job.Kind == LoadJob {
		f.mu.held = append(f.mu.held, run)
		return true
	}
	run()
	return true
}

// open lets the held loads go on.
func (f *fakeAgent) open() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, run := range f.mu.held {
		run()
	}
	f.mu.held, f.deaf = nil, false
}

func (f *fakeAgent) run(j *Job, lag time.Duration, cancelled chan struct{}) {
	status := make([]uint8, 0, 64)
	timer := time.NewTimer(lag)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-f.end:
		return
	case <-cancelled:
		f.report(j, cancelAll(j), 0)
		if f.late == nil {
			return
		}
		select {
		case <-f.late:
		case <-f.end:
			return
		}
	}
	if !f.noWait && !f.reached(j.Step) {
		return
	}
	for _, s := range j.Sections {
		for i, id := range s.Blocks {
			k := cacheKey{group: s.Group, hash: Hash(s.Hashes[i*len(Hash{}) : (i+1)*len(Hash{})])}
			status = append(status, f.one(j, k, id))
		}
	}
	f.report(j, status, len(status)*len(f.w.ranks))
}

func cancelAll(j *Job) (status []uint8) {
	for _, s := range j.Sections {
		for range s.Blocks {
			status = append(status, 17)
		}
	}
	return status
}

func (f *fakeAgent) report(j *Job, status []uint8, moved int) {
	f.events <- Event{Job: j.ID, Status: status, Moved: moved}
}

// one copies a block, outside of the lock as the real one does.
func (f *fakeAgent) one(j *Job, k cacheKey, id BlockID) uint8 {
	f.mu.Lock()
	bytes, luck := f.mu.stored[k], f.mu.rng.Float64()
	f.mu.Unlock()
	switch {
	case j.Kind == LoadJob && (bytes == nil || luck < f.lose):
		return 5
	case j.Kind == LoadJob:
		f.scatter(bytes, id)
		return statusOK
	case bytes != nil:
		return 1
	case luck < f.busy:
		return statusBusy
	}
	bytes = f.gather(id)
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.isRevoked(j.Revoke) {
		f.mu.revoked++
		return 16
	}
	f.mu.stored[k] = bytes
	return statusOK
}

func (f *fakeAgent) gather(id BlockID) (all [][]byte) {
	for _, r := range f.w.ranks {
		var b []byte
		for s := range r.segments {
			b = append(b, r.segments[s].of(id)...)
		}
		all = append(all, b)
	}
	return all
}

func (f *fakeAgent) scatter(all [][]byte, id BlockID) {
	for i, r := range f.w.ranks {
		b := all[i]
		for s := range r.segments {
			b = b[copy(r.segments[s].of(id), b):]
		}
	}
}

// reached waits until the engine has reached a step. It returns false if the test ends before. The
// step is a word in the engine's memory, which an agent has to poll.
func (f *fakeAgent) reached(step uint64) (reached bool) {
	over := false
	pooltest.Until(f.t, "the engine reaches a step", func() bool {
		select {
		case <-f.end:
			over = true
		default:
		}
		reached = f.step() >= step
		return reached || over
	})
	return reached
}

func (f *fakeAgent) step() uint64 {
	n := ^uint64(0)
	for _, r := range f.w.ranks {
		n = min(n, r.Step())
	}
	return n
}

func (f *fakeAgent) isRevoked(word uint32) bool {
	for i, r := range f.w.ranks {
		_, sync := r.SyncDesc()
		if binary.LittleEndian.Uint32(f.words[i][sync.RevokeOff+uint64(word)*4:]) != 0 {
			return true
		}
	}
	return false
}
