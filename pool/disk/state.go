package disk

import (
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// State of a directory.
type State uint8

// The states. In all but StateMissing, blocks can still be read.
const (
	StateOK       State = iota
	StateFull           // the file system is full, although the store is within its limit; nothing is written
	StateReadOnly       // the file system or the directory cannot be written
	StateFailed         // a write, or many consecutive reads, failed in another way; or a later version wrote the files
	StateMissing        // it does not exist, or is no directory; nothing is read or written
	states
)

var stateNames = [states]string{"ok", "full", "readonly", "failed", "missing"}

func (s State) String() string {
	if s < states {
		return stateNames[s]
	}
	return fmt.Sprintf("state %d", uint8(s))
}

// stateOf returns the state of a directory after an error of the file system.
func stateOf(err error) State {
	switch {
	case err == nil:
		return StateOK
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT), errors.Is(err, unix.EFBIG):
		return StateFull
	case errors.Is(err, unix.EROFS), errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		return StateReadOnly
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ENODEV):
		return StateMissing
	}
	return StateFailed
}

// failReads is the number of consecutive failed reads after which a directory counts as failed, and
// is not read until a probe succeeds.
const failReads = 16

// setState changes the state and wakes all that wait for room. With the lock held.
func (d *dir) setState(to State, reason error) {
	from := d.state
	if from == to {
		return
	}
	d.state, d.reason = to, reason
	d.s.count.stateChanges.Add(1)
	if to == StateOK {
		d.wait = 0
	} else {
		d.abandon()
		d.later()
	}
	d.broadcast()
	if f := d.s.o.OnState; f != nil {
		d.notices = append(d.notices, func() { f(d.path, from, to, reason) })
		d.wakeKeeper()
	}
}

// later sets the time of the next probe. With the lock held.
func (d *dir) later() {
	d.wait = min(max(2*d.wait, d.s.o.ProbeEvery), d.s.o.ProbeMax)
	d.probeAt = time.Now().Add(d.wait)
}

// ErrBuffered is the reason passed to OnState, with an unchanged state, for a directory whose file
// system cannot do O_DIRECT.
var ErrBuffered = errors.New("the file system cannot do O_DIRECT, the page cache is used")

// notifyBuffered reports once per opening that the page cache is used. With the lock held.
func (d *dir) notifyBuffered() {
	for _, g := range d.segments {
		if !g.direct && !d.saidBuffered {
			d.saidBuffered = true
			d.notifyLater(ErrBuffered)
		}
	}
}

// notifyLater queues a call of OnState that changes no state. With the lock held.
func (d *dir) notifyLater(reason error) {
	if f := d.s.o.OnState; f != nil {
		state := d.state
		d.notices = append(d.notices, func() { f(d.path, state, state, reason) })
		d.wakeKeeper()
	}
}

// notify calls OnState for all changes, without the lock.
func (d *dir) notify() {
	d.mu.Lock()
	told := d.notices
	d.notices = nil
	d.mu.Unlock()
	for _, f := range told {
		f()
	}
}
