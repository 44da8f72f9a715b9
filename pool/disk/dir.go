package disk

import (
	"errors"
	"fmt"
	"hash/maphash"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/backoff"
	"github.com/kvagent/kvagent/pool"
)

// dir is one directory and its log.
type dir struct {
	s        *Store
	number   int // in Options.Dirs
	path     string
	limit    int64         // bytes of disk it may use
	salt     uint64        // of its name, for choose
	buffers  chan *bounce  // of reads
	wake     chan struct{} // wakes the keeper; of length 1
	memory   []byte        // of writers and reads
	readable atomic.Bool
	badReads atomic.Int32

	mu   sync.Mutex
	work *sync.Cond // there may be something to write, or room for it

	state   State
	reason  error // of a state other than StateOK
	wait    backoff.Backoff
	probeAt time.Time
	told    State // to OnState

	lockFD   int  // of the directory; -1 while it is not open
	opened   bool // recovered
	stopping bool
	lastID   uint64
	segments []*segment // oldest first; the open one and the next are at the end
	writing  *segment   // being written, nil if there is none
	next     *segment   // prepared, to be written after that
	ended    []*segment // full; their footers are still to be written
	taken    int64      // bytes of disk, of all segments

	queue       []*record // to be written, in order
	queuedBytes int64
	inFlight    int             // batches being written
	pending     map[tag]*record // blocks that are queued or being written
}

func newDir(s *Store, i int) (d *dir, err error) {
	o := &s.o.Dirs[i]
	d = &dir{
		s: s, number: i, path: o.Path, limit: o.Bytes, salt: uint64(pool.Sum(0, []byte(o.Path))),
		buffers: make(chan *bounce, s.o.ReadDepth), wake: make(chan struct{}, 1),
		lockFD: -1, state: StateMissing, reason: errNotOpened, pending: map[tag]*record{},
		wait: backoff.Backoff{First: s.o.probeEvery, Last: probeMax},
	}
	d.work = sync.NewCond(&d.mu)
	// The memory is mapped in one, so that all of it can be in huge pages.
	d.memory, err = mapMemory(int64(s.o.WriteDepth*s.o.WriteBytes + s.o.ReadDepth*runMemory))
	return d, err
}

var errNotOpened = errors.New("not opened yet")

// start starts the directory's goroutines. stop ends them, and Store.Close waits for them.
func (d *dir) start() {
	rest := d.memory
	take := func(n int64) (p []byte) {
		p, rest = rest[:n:n], rest[n:]
		return p
	}
	for range d.s.o.WriteDepth {
		memory := take(int64(d.s.o.WriteBytes))
		d.s.work.Go(func() { d.write(memory) })
	}
	for range d.s.o.ReadDepth {
		d.buffers <- &bounce{lent: take(runMemory)}
	}
	d.s.keepers.Go(d.keep)
	d.wakeKeeper()
}

// shut closes the segments with their footers, and the files, after the goroutines have ended.
func (d *dir) shut() error {
	if d.opened {
		if g := d.next; g != nil {
			d.next = nil
			d.drop(g) // nothing was written to it
		}
		if d.writing != nil {
			d.end(d.writing)
		}
		d.closeEnded()
	}
	d.notify()
	for len(d.buffers) > 0 {
		(<-d.buffers).free()
	}
	return errors.Join(d.detach(), unmap(d.memory))
}

func (d *dir) wakeKeeper() {
	select {
	case d.wake <- struct{}{}:
	default: // it is awake
	}
}

// failQueued fails all that is to be written, and ends the open segment. With the lock held.
func (d *dir) failQueued() {
	for _, r := range d.queue {
		d.settle(r, pool.Busy)
	}
	d.queue = nil
	if d.writing != nil {
		d.end(d.writing)
	}
}

// end takes a segment out of writing. Its footer is written later. With the lock held.
func (d *dir) end(g *segment) {
	d.ended = append(d.ended, g)
	d.writing = nil
	d.wakeKeeper()
}

func (s *Store) tagOf(k *pool.Key) tag {
	b := keyBytes(k)
	return tag{maphash.Bytes(s.seeds[0], b[:]), maphash.Bytes(s.seeds[1], b[:])}
}

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
	if d.state == to {
		return
	}
	d.state, d.reason = to, reason
	d.s.add(stateChanges, 1)
	if to == StateOK {
		d.wait.Reset()
	} else {
		d.failQueued()
		d.later()
	}
	d.work.Broadcast()
	d.wakeKeeper()
}

// later sets the time of the next probe. With the lock held.
func (d *dir) later() {
	d.probeAt = time.Now().Add(d.wait.Next())
}

// notify calls OnState if there is something new. Only the keeper calls it, or Close after it.
func (d *dir) notify() {
	d.mu.Lock()
	from, to, reason := d.told, d.state, d.reason
	d.told = to
	d.mu.Unlock()
	if f := d.s.o.OnState; f != nil && from != to {
		f(d.path, from, to, reason)
	}
}

// farAway is how long the keeper sleeps when it has no work.
const farAway = time.Hour

// probe retries a lost directory when it is time, and returns the time until the next probe.
func (d *dir) probe() time.Duration {
	d.mu.Lock()
	state, due, opened, wait := d.state, time.Until(d.probeAt), d.opened, d.wait
	d.mu.Unlock()
	if state == StateOK {
		return farAway
	}
	if due > 0 {
		return due
	}
	var err error
	if state == StateMissing || !opened {
		err = d.reopen(opened)
	} else {
		err = d.tryOut()
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if err == nil {
		d.works()
		return farAway
	}
	d.setState(stateOf(err), err) // it may have failed in another way than before
	d.wait = wait
	d.later()
	return d.wait.Pause()
}

// reopen recovers the directory anew.
func (d *dir) reopen(opened bool) error {
	d.mu.Lock()
	writing, reason := d.inFlight > 0, d.reason
	d.mu.Unlock()
	if writing {
		return reason
	}
	if opened { // open files may still be readable
		fd, err := openDir(d.path)
		if err != nil {
			return err
		}
		_ = unix.Close(fd) // only read
	}
	_ = d.detach() // of files that may no longer exist
	return d.open()
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
