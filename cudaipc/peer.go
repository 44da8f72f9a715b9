package cudaipc

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// ErrClosed is the error of an import after the device's Close.
var ErrClosed = fmt.Errorf("device closed: %w", ErrPeer)

// Peers counts the peers of a device that are open or being opened.
type Peers struct {
	mu     sync.Mutex
	open   int
	closed bool
}

// Enter counts a peer. It returns ErrClosed after Close.
func (p *Peers) Enter() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return ErrClosed
	}
	p.open++
	return nil
}

// Leave ends the count of a peer.
func (p *Peers) Leave() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.open--
}

// Close lets no peer enter any more. It returns ErrBusy while one is counted.
func (p *Peers) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return ErrClosed
	}
	if p.open > 0 {
		return fmt.Errorf("%d peers are open: %w", p.open, ErrBusy)
	}
	p.closed = true
	return nil
}

// Flight is a copy or a sample, from its submission until its end.
type Flight struct {
	Copy   *Copy // nil: a sample
	Sample *Sample
	End    Done
	peer   *Base
	until  time.Time     // of a sample
	done   chan struct{} // closed when End is set
}

// Finish ends a flight. A caller that sees the end may close the peer at once.
func (f *Flight) Finish() {
	f.peer.underWay.Add(-1)
	close(f.done)
}

// wait is the flight's Ticket. A copy on a lost device is not known to have ended.
func (f *Flight) wait(timeout time.Duration) (Done, bool, error) {
	select {
	case <-f.done:
		return f.End, true, nil
	case <-f.peer.Lost:
		return Done{}, false, ErrLost
	default:
	}
	if timeout <= 0 {
		return Done{}, false, nil
	}
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	select {
	case <-f.done:
		return f.End, true, nil
	case <-f.peer.Lost:
		return Done{}, false, ErrLost
	case <-timer.C:
		return Done{}, false, nil
	}
}

// Fits reports whether an end is one of this flight.
func (f *Flight) Fits(d *Done) bool {
	n, sums := f.blocks()
	return (d.Bad == nil || len(d.Bad) == n) && (d.Bad != nil) == (d.Err != nil) && (!sums || len(d.Sums) == n)
}

// Fail ends a flight of which nothing arrived.
func (f *Flight) Fail(err error) {
	n, sums := f.blocks()
	f.End = AllBad(n, sums, err)
	f.Finish()
}

// blocks returns how many blocks a flight has, and whether they are summed.
func (f *Flight) blocks() (n int, sums bool) {
	if f.Copy != nil {
		return len(f.Copy.Blocks), f.Copy.Sum
	}
	return len(f.Sample.Blocks), true
}

// AllBad returns the end of a copy of which nothing arrived.
func AllBad(blocks int, sums bool, err error) Done {
	d := Done{Err: err, Bad: slices.Repeat([]bool{true}, blocks)}
	if sums {
		d.Sums = make([]uint32, blocks)
	}
	return d
}

// MarkBad notes that block i of n did not arrive. Err keeps the first reason.
func (d *Done) MarkBad(i, n int, err error) {
	if d.Bad == nil {
		d.Bad = make([]bool, n)
		d.Err = err
	}
	d.Bad[i] = true
}

// ClosesWithin waits for a channel to be closed. With timeout 0 or less it does not wait.
func ClosesWithin(c <-chan struct{}, timeout time.Duration) bool {
	select {
	case <-c:
		return true
	default:
	}
	if timeout <= 0 {
		return false
	}
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	select {
	case <-c:
		return true
	case <-timer.C:
		return false
	}
}

// Base is what the peers of all devices are made of. Its regions do not change between Import and
// Close.
type Base struct {
	Pid     int
	Regions map[RegionID]*Opened
	Words   []byte          // the sync region; nil: no words
	Proof   int             // Import.Proof; 0: none
	Lost    <-chan struct{} // closed when the device is lost; nil: never
	pidfd   int             // -1: not watched
	sync    Sync

	underWay atomic.Int32 // copies that are being checked, waiting or running
	mu       struct {
		sync.RWMutex
		gone error // why calls fail; nil: they do not
		shut bool
	}
}

// Prepare makes a peer that has nothing open yet, and checks what does not depend on the device.
func (p *Base) Prepare(im *Import) error {
	p.Pid, p.pidfd, p.Regions = im.Pid, -1, map[RegionID]*Opened{}
	return im.check()
}

// Use calls f if the peer is open, and keeps it open meanwhile.
func (p *Base) Use(f func() error) error {
	p.mu.RLock()
	defer p.mu.RUnlock()
	if p.mu.gone != nil {
		return p.mu.gone
	}
	return f()
}

// Lose makes all calls but Close fail from now on.
func (p *Base) Lose(why error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mu.gone = fmt.Errorf("%w: %w", why, ErrPeer)
}

// Shut makes all calls fail from now on. Unless force is set, it returns ErrBusy while a copy is in
// flight.
func (p *Base) Shut(force bool) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.mu.shut:
		return ErrPeer
	case !force && p.underWay.Load() > 0:
		return fmt.Errorf("a copy is in flight: %w", ErrBusy)
	}
	p.mu.shut, p.mu.gone = true, ErrPeer
	return nil
}

// StartCopy checks a copy and passes it to submit, which must not wait.
func (p *Base) StartCopy(c *Copy, arena int64, submit func(*Flight) error) (Ticket, error) {
	return p.start(&Flight{Copy: c}, func() error { return p.checkCopy(c, arena) }, submit)
}

// StartSum does the same with a sample.
func (p *Base) StartSum(s *Sample, submit func(*Flight) error) (Ticket, error) {
	f := &Flight{Sample: s, until: time.Now().Add(s.Within)}
	return p.start(f, func() error { return p.checkSample(s) }, submit)
}

func (p *Base) start(f *Flight, check func() error, submit func(*Flight) error) (Ticket, error) {
	f.peer, f.done = p, make(chan struct{})
	err := p.Use(func() error {
		n := p.underWay.Add(1)
		err := check()
		if err == nil && n > MaxCopies {
			err = fmt.Errorf("%d copies are in flight, at most %d: %w", n-1, MaxCopies, ErrBusy)
		}
		if err == nil {
			err = submit(f)
		}
		if err != nil {
			p.underWay.Add(-1)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	return f.wait, nil
}

// PlaceWords finds the words that s names, with event cells of cell bytes.
func (p *Base) PlaceWords(s *Sync, cell uint64) error {
	if s == nil || *s == (Sync{}) {
		return nil
	}
	r := p.Regions[s.Region]
	if r == nil {
		return fmt.Errorf("sync: region %d is not there: %w", s.Region, ErrRange)
	}
	if r.Mem == nil {
		return fmt.Errorf("sync: region %d is not a descriptor to map: %w", s.Region, ErrKind)
	}
	if err := s.check(r.Size, cell); err != nil {
		return err
	}
	p.Words, p.sync = r.Mem, *s
	return nil
}

// Watch opens a descriptor that reports the end of the peer's process.
func (p *Base) Watch() error {
	fd, err := unix.PidfdOpen(p.Pid, 0)
	if err != nil {
		return fmt.Errorf("process %d: %w", p.Pid, err)
	}
	p.pidfd = fd
	return nil
}

// ErrPeerDead is the error of a copy with a process that has ended.
var ErrPeerDead = errors.New("the peer's process has ended")

// Dead reports whether the peer's process, not a reused number, has ended; false: not watched.
func (p *Base) Dead() bool {
	if p.pidfd < 0 {
		return false
	}
	fds := []unix.PollFd{{Fd: int32(p.pidfd), Events: unix.POLLIN}}
	for {
		n, err := unix.Poll(fds, 0)
		if !errors.Is(err, unix.EINTR) {
			return n > 0 || err != nil
		}
	}
}

// Unmap closes the regions. No call reaches the peer any more.
func (p *Base) Unmap() {
	for _, r := range p.Regions {
		r.Close()
	}
	if p.pidfd >= 0 {
		_ = unix.Close(p.pidfd)
	}
	if p.Proof > 0 {
		_ = unix.Close(p.Proof) // last: the proof that the peer's memory is not touched any more
	}
}
