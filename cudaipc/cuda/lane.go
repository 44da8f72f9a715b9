//go:build cuda

package cuda

import (
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/driver"
)

// Limits of a lane.
const (
	maxChunks  = 64       // started and not ended; each has an event
	chunkBytes = 32 << 20 // of one chunk, about: memory of a flight is done with in steps of this
	chunkCalls = 4096     // rectangles and single copies of one chunk
	maxMerged  = 16 << 20 // bytes of one call
	minRows    = 2        // of a rectangle
	maxRows    = 16384
)

// pauses between two looks at the oldest chunk, by how long it has been looked for.
const (
	pauseFirst = 10 * time.Microsecond
	pauseLater = 100 * time.Microsecond // after a millisecond
	pauseLong  = time.Millisecond       // after a tenth of a second
)

// lane does the copies of one direction in the order in which they arrive. It starts them in
// chunks, up to maxChunks, records an event after each chunk, and polls the events in their
// order. All fields but flights belong to its role.
type lane struct {
	d        *Device
	dir      cudaipc.Direction
	flatPath CopyPath
	rowsPath CopyPath
	flights  *queue[*flight]
	role     *driver.Role
	stream   driver.Stream
	priority int // of the stream; lower numbers go first
	planner  planner
	spans    []span
	issue    issue
	ring     *ring

	flight  *flight // whose chunks are being started; nil: none
	rects   []rect  // of it, not yet started
	started []chunk // oldest first
	events  []driver.Event

	ringBytes atomic.Uint64 // copied through the ring so far
}

// chunk is some calls and the event recorded after them.
type chunk struct {
	flight *flight
	event  driver.Event
	bytes  uint64
	staged *staged // its bytes go through the ring
}

func startLane(d *Device, dir cudaipc.Direction, o *Options) (*lane, error) {
	l := &lane{
		d:        d,
		dir:      dir,
		flatPath: FlatPath,
		rowsPath: RowsPath,
		flights:  newQueue[*flight](),
	}
	if o.Path != "" {
		l.flatPath, l.rowsPath = o.Path, o.Path
	}
	var err error
	if l.role, err = driver.StartRole(d.ctx); err != nil {
		return nil, err
	}
	l.role.Do(func() { err = l.open(o) })
	if err != nil {
		return nil, errors.Join(err, l.close())
	}
	l.role.Begin(l.run)
	return l, nil
}

// open makes the stream and the ring. Loads have a higher priority than saves.
func (l *lane) open(o *Options) error {
	last, first, err := driver.Priorities()
	if err != nil {
		return err
	}
	pitch, err := l.d.ctx.MaxPitch()
	if err != nil {
		return err
	}
	l.planner.planLimits = planLimits{
		piece:    uint64(o.PinPiece),
		bytes:    min(maxMerged, uint64(o.Ring)),
		minRows:  minRows,
		maxRows:  maxRows,
		maxPitch: pitch,
	}
	l.priority = last
	if l.dir == cudaipc.Scatter {
		l.priority = first
	}
	if l.stream, err = driver.NewStream(l.priority); err != nil {
		return err
	}
	l.ring, err = newRing(int(o.Ring))
	return err
}

// run starts and reaps chunks until the lane is closed.
func (l *lane) run() {
	preciseSleep()
	since := time.Now()
	for l.d.alive() == nil {
		l.start()
		if len(l.started) == 0 {
			if !l.next(true) {
				return
			}
			since = time.Now()
			continue
		}
		if l.reap() {
			since = time.Now()
			continue
		}
		pause(time.Since(since))
	}
}

func pause(waited time.Duration) {
	d := pauseFirst
	if waited > 100*time.Millisecond {
		d = pauseLong
	} else if waited > time.Millisecond {
		d = pauseLater
	}
	t := unix.NsecToTimespec(int64(d))
	_ = unix.Nanosleep(&t, nil)
}

// next takes a flight and plans it, if none is being started. It reports whether it has one.
func (l *lane) next(wait bool) bool {
	f, ok := l.flights.take(wait)
	if !ok {
		return false
	}
	l.flight, l.spans = f, l.spans[:0]
	var r *cudaipc.Opened
	for i := range f.Copy.Runs {
		run := &f.Copy.Runs[i]
		if i == 0 || run.Region != f.Copy.Runs[i-1].Region {
			r = f.of.Regions[run.Region]
		}
		l.spans = append(l.spans, span{
			dev: r.Addr + run.RegionOff,
			off: uint64(run.ArenaOff),
			n:   uint64(run.Len),
			in:  run.Region,
		})
	}
	_, call := f.most()
	l.planner.bytes = min(call, uint64(len(l.ring.mem)))
	l.rects = l.planner.plan(l.spans, f.Copy.Blocks)
	f.inOrder = !l.planner.isTurned
	return true
}

// start starts as many chunks as there is room for.
func (l *lane) start() {
	for l.flight != nil || l.next(false) {
		if len(l.rects) == 0 || l.flight.err != nil {
			l.submitted()
			continue
		}
		pinned := l.d.pins.at(l.rects[0].off)
		if !l.room(pinned) {
			return
		}
		l.chunk(pinned)
		if l.d.alive() != nil {
			return
		}
	}
}

// submitted notes that nothing more of the flight will be started.
func (l *lane) submitted() {
	f := l.flight
	l.flight, l.rects, f.submitted = nil, nil, true
	if f.chunks == 0 {
		l.d.copied(f)
	}
}

// room reports whether a chunk can be started now. Pinned chunks and chunks through the ring
// never overlap: the ring's bytes reach the arena later, and an older copy must not overwrite a
// younger one.
func (l *lane) room(pinned bool) bool {
	n := len(l.started)
	return n == 0 || n < maxChunks && (l.started[n-1].staged == nil) == pinned &&
		(pinned || l.ring.room())
}

// chunk starts the next calls of the flight and records an event after them.
func (l *lane) chunk(pinned bool) {
	c := chunk{flight: l.flight}
	var err error
	if pinned {
		c.bytes, err = l.direct()
	} else {
		c.staged, c.bytes, err = l.viaRing()
	}
	if err = l.d.judge(err); err != nil {
		l.flight.err = err // copies started before it are waited for all the same
	}
	if l.d.alive() != nil {
		return
	}
	if c.event, err = l.event(); err == nil {
		err = c.event.Record(l.stream)
	}
	if err != nil {
		l.d.lose(err) // the end of the copies cannot be known any more
		return
	}
	l.flight.chunks++
	l.started = append(l.started, c)
}

// direct starts calls between the GPU and pinned pieces of the arena.
func (l *lane) direct() (uint64, error) {
	l.issue.reset()
	most, _ := l.flight.most()
	var bytes uint64
	n := 0
	for n < len(l.rects) && n < chunkCalls && bytes < most && l.d.pins.at(l.rects[n].off) {
		l.add(&l.rects[n])
		bytes += l.rects[n].n * l.rects[n].rows
		n++
	}
	l.rects = l.rects[n:]
	return bytes, l.send()
}

func (l *lane) event() (driver.Event, error) {
	if n := len(l.events); n > 0 {
		e := l.events[n-1]
		l.events = l.events[:n-1]
		return e, nil
	}
	return driver.NewEvent(false)
}

// reap ends the oldest chunk if the GPU has, and reports whether it did.
func (l *lane) reap() bool {
	c := l.started[0]
	ended, err := c.event.Fired()
	if err != nil {
		l.d.lose(err) // nor can it here
		return false
	}
	if !ended {
		return false
	}
	l.started = l.started[1:]
	l.events = append(l.events, c.event)
	if c.staged != nil {
		l.ring.end(c.staged, l.d.arena, c.flight)
	}
	l.d.arrived(c.flight, c.bytes)
	c.flight.chunks--
	if c.flight.submitted && c.flight.chunks == 0 {
		l.d.copied(c.flight)
	}
	return true
}

// close ends a lane that is idle, or whose device is lost.
func (l *lane) close() error {
	l.flights.close()
	var errs []error
	l.role.Do(func() {
		if l.d.alive() != nil || l.stream == (driver.Stream{}) {
			return
		}
		for _, e := range l.events {
			errs = append(errs, e.Destroy())
		}
		errs = append(errs, l.ring.close(), l.stream.Destroy())
	})
	l.role.Close()
	return errors.Join(errs...)
}

// preciseSleep lets the calling thread wake up from short sleeps within 1 us instead of 50.
func preciseSleep() { _ = unix.Prctl(unix.PR_SET_TIMERSLACK, 1000, 0, 0, 0) }

// queue passes values on without waiting for the receiver. Each use states its bound.
type queue[T any] struct {
	mu struct {
		sync.Mutex
		list   []T
		closed bool
	}
	some sync.Cond // something is in the list, or it is closed
}

func newQueue[T any]() *queue[T] {
	q := &queue[T]{}
	q.some.L = &q.mu
	return q
}

func (q *queue[T]) put(v T) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.mu.list = append(q.mu.list, v)
	q.some.Signal()
}

// take returns the oldest; with wait it waits for one. ok is false if there is none.
func (q *queue[T]) take(wait bool) (v T, ok bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for wait && len(q.mu.list) == 0 && !q.mu.closed {
		q.some.Wait()
	}
	if len(q.mu.list) == 0 {
		return v, false
	}
	v = q.mu.list[0]
	q.mu.list = q.mu.list[1:]
	return v, true
}

// close wakes waiting receivers; values in the queue can still be taken.
func (q *queue[T]) close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.mu.closed = true
	q.some.Broadcast()
}
