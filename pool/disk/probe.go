package disk

import (
	"time"

	"golang.org/x/sys/unix"
)

// farAway is how long the keeper sleeps when it has no work.
const farAway = time.Hour

// probe retries a lost directory when it is time, and returns the time until the next probe.
func (d *dir) probe() time.Duration {
	d.mu.Lock()
	state, due, opened := d.state, time.Until(d.probeAt), d.opened
	d.mu.Unlock()
	if state == StateOK {
		return farAway
	}
	if due > 0 {
		return due
	}
	d.s.count.probes.Add(1)
	if state == StateMissing || !opened {
		if d.quiet() {
			d.reopen()
		}
	} else if err := d.tryOut(); err == nil {
		d.comeBack()
	} else {
		d.remain(err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.state == StateOK {
		d.wakeKeeper()
		return farAway
	}
	return time.Until(d.probeAt)
}

// quiet reports whether no piece is being written.
func (d *dir) quiet() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.cur == nil && len(d.sealed) == 0 && d.inFlight == 0 {
		return true
	}
	d.later()
	return false
}

// reopen recovers the directory anew.
func (d *dir) reopen() {
	fd, err := openDir(d.path)
	if err == nil {
		err = unix.Close(fd)
	}
	d.mu.Lock()
	if err != nil && d.opened {
		d.later() // open files may still be readable
		d.mu.Unlock()
		return
	}
	wait := d.wait
	d.mu.Unlock()
	_ = d.detach() // of files that may no longer exist
	err = d.open()
	d.mu.Lock()
	defer d.mu.Unlock()
	if err != nil {
		d.wait = wait
		d.later()
	}
}

// tryOut writes a page as a segment's first, and reads it.
func (d *dir) tryOut() error {
	d.mu.Lock()
	g := d.next
	d.mu.Unlock()
	if g == nil {
		var err error
		if !d.makeRoom() {
			return errNotOpened
		}
		if g, err = d.create(); err != nil {
			return err
		}
		d.mu.Lock()
		d.adopt(g)
		d.mu.Unlock()
	}
	p, err := mapMemory(pageBytes)
	if err != nil {
		return err
	}
	defer func() { _ = unmap(p) }() // it was mapped above
	if err := g.writeAt(p, 0); err != nil {
		return err
	}
	return g.readAt(p, 0)
}

func (d *dir) comeBack() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.badReads.Store(0)
	d.readable.Store(true)
	d.s.notes.noteAll()
	d.setState(StateOK, nil)
}

// remain records a failed probe, which may have failed in another way than before.
func (d *dir) remain(err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	wait := d.wait
	if to := stateOf(err); to != d.state && to != StateOK {
		d.setState(to, err)
		d.wait = wait
	}
	d.later()
}
