package agent

import (
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/transfer"
)

// Fault is for tests of whoever checks the bytes: it damages the pool on purpose. The zero value does nothing.
type Fault struct {
	Allow     bool         // POST /fault?flip is served
	FlipAfter uint64       // blocks saved, after which one byte of a stored block is flipped; 0: never
	Flip      func() error // flips one byte of some stored block
}

// faultCounter flips the byte once.
type faultCounter struct {
	fault *Fault
	saved atomic.Uint64
	done  atomic.Bool
}

func (f *faultCounter) init(fault *Fault) { f.fault = fault }

// count counts the blocks a job stored; it says whether it is time to flip.
func (f *faultCounter) count(c transfer.Completion) bool {
	if f.fault.FlipAfter == 0 || f.fault.Flip == nil || c.Kind != transfer.Save || f.done.Load() {
		return false
	}
	n := uint64(0)
	for _, s := range c.Status {
		if s == pool.OK {
			n++
		}
	}
	return n > 0 && f.saved.Add(n) >= f.fault.FlipAfter && f.done.CompareAndSwap(false, true)
}

// flip damages the pool, and says so loudly.
func (a *Agent) flip() error {
	if a.cfg.Fault.Flip == nil {
		return errors.New("fault: the pool has no way to flip a byte")
	}
	if err := a.cfg.Fault.Flip(); err != nil {
		return fmt.Errorf("fault: %w", err)
	}
	a.log.Warn("FAULT: one byte of a stored block was flipped on purpose")
	return nil
}

// flipLater flips once enough blocks are saved; what could not be flipped now is tried again after the next save.
func (a *Agent) flipLater(c transfer.Completion) {
	if a.fault.count(c) && a.flip() != nil {
		a.fault.done.Store(false)
	}
}
