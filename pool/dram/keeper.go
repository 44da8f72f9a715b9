package dram

import (
	"sync"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram/arena"
)

// keepEvery is how often a pool notes in its file that it is in use, and what its policy learned.
const keepEvery = 10 * time.Second

// keeper is the goroutine that does so. It owns the file. Nil: the pool has none.
type keeper struct {
	file    *arena.File
	advisor *advisor
	tell    func(faults uint64) // may be nil
	told    uint64
	ending  chan struct{}
	done    sync.WaitGroup
}

func startKeeper(f *arena.File, a *advisor, tell func(faults uint64)) *keeper {
	k := &keeper{file: f, advisor: a, tell: tell, ending: make(chan struct{})}
	k.done.Go(k.run)
	return k
}

func (k *keeper) run() {
	every := time.NewTicker(keepEvery)
	defer every.Stop()
	for {
		select {
		case <-every.C:
			k.keep()
		case <-k.ending:
			k.keep()
			return
		}
	}
}

func (k *keeper) keep() {
	if b := k.advisor.learned(); b != nil {
		k.file.KeepLearned(b)
	}
	k.file.NoteAlive()
	if n := k.file.Faulted(); n > k.told && k.tell != nil {
		k.told = n
		k.tell(n)
	}
}

// close keeps once more and gives the file back.
func (k *keeper) close() error {
	if k == nil {
		return nil
	}
	k.file.Unsign()
	close(k.ending)
	k.done.Wait()
	return k.file.Close()
}

// learned is what the policy learned; nil if there is nothing to keep.
func (a *advisor) learned() []byte {
	if a == nil {
		return nil
	}
	learner, ok := a.policy.(pool.Learner)
	if !ok {
		return nil
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return learner.Learned()
}

// learn gives the policy what was kept. Nobody else has it yet.
func (a *advisor) learn(f *arena.File) error {
	if a == nil {
		return nil
	}
	learner, ok := a.policy.(pool.Learner)
	if !ok {
		return nil
	}
	b := f.KeptLearned()
	if b == nil {
		return nil
	}
	return learner.Learn(b)
}
