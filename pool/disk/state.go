package disk

import (
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// State of a directory.
type State uint8

// The states. In all but StateMissing what is stored is still read.
const (
	StateOK       State = iota
	StateFull           // the file system has no room, although the store is within its limit; nothing is written
	StateReadOnly       // the file system or the directory may not be written
	StateFailed         // a write, or many reads in turn, failed in another way; or the files are of a later version
	StateMissing        // it is not there, or not a directory; nothing is read or written
	states
)

var stateNames = [states]string{"ok", "full", "readonly", "failed", "missing"}

func (s State) String() string {
	if s < states {
		return stateNames[s]
	}
	return fmt.Sprintf("state %d", uint8(s))
}

// stateOf is the state that an error of the file system puts a directory in.
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

// failReads is the number of reads that fail one after the other before a directory counts as
// failed, and is not read until a probe reads again.
const failReads = 16

// setState changes the state. With the lock held. Whoever waits for room looks again.
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
		d.told = append(d.told, func() { f(d.path, from, to, reason) })
		d.wakeKeeper()
	}
}

// later sets the time of the next probe. With the lock held.
func (d *dir) later() {
	d.wait = min(max(2*d.wait, d.s.o.ProbeEvery), d.s.o.ProbeMax)
	d.probeAt = time.Now().Add(d.wait)
}

// ErrBuffered is the reason OnState is given, with the state as it is, for a directory whose file
// system cannot do O_DIRECT.
var ErrBuffered = errors.New("the file system cannot do O_DIRECT, the page cache is used")

// tellBuffered says once in each opening that the page cache is used. With the lock held.
func (d *dir) tellBuffered() {
	for _, g := range d.segments {
		if !g.direct && !d.saidBuffered {
			d.saidBuffered = true
			d.tellLater(ErrBuffered)
		}
	}
}

// tellLater has OnState told of something that changes no state. With the lock held.
func (d *dir) tellLater(reason error) {
	if f := d.s.o.OnState; f != nil {
		state := d.state
		d.told = append(d.told, func() { f(d.path, state, state, reason) })
		d.wakeKeeper()
	}
}

// tell calls OnState for what changed, without the lock.
func (d *dir) tell() {
	d.mu.Lock()
	told := d.told
	d.told = nil
	d.mu.Unlock()
	for _, f := range told {
		f()
	}
}
