package disk

import (
	"errors"
	"hash/maphash"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvagent/kvagent/pool"
)

// dir is one directory and its log.
type dir struct {
	s          *Store
	path       string
	limit      int64   // bytes of disk it may use
	salt       uint64  // of its name, for choose
	weight     float64 // its share of the keys
	reads      chan *run
	turn       chan struct{} // of length 1: held by the call that submits runs
	wake       chan struct{} // wakes the keeper; of length 1
	memory     []byte        // of pieces and reads
	readMemory [][]byte      // of each reader
	queue      *queue        // of readers, then writers
	readable   atomic.Bool
	lost       atomic.Bool // the disk may have blocks that are not in the index: deletes write a tombstone for any key
	badReads   atomic.Int32

	mu      sync.Mutex
	work    *sync.Cond    // there may be a piece to write
	changed chan struct{} // closed and replaced when there may be room, or the state changed

	state        State
	reason       error // of a state other than StateOK
	wait         time.Duration
	probeAt      time.Time
	notices      []func() // pending calls of OnState
	saidBuffered bool

	lockFD   int  // of the directory; -1 while it is not open
	opened   bool // recovered
	stopping bool
	lastID   uint64
	segments []*segment // oldest first; the open one and the next are at the end
	writing  *segment   // being written, nil if there is none
	next     *segment   // prepared, to be written after that
	ended    []*segment // full; their footers are still to be written
	evicting bool       // the oldest is being evicted
	emptied  bool       // a segment may have become empty
	taken    int64      // bytes of disk, of all segments

	cur      *piece   // being filled
	sealed   []*piece // to be written, in order
	inFlight int      // being written
	free     [][]byte // memory of pieces
	pending  map[tag]*record

	owed    []pool.Key // deleted while nothing could be written; at most maxOwed
	owedAll bool       // there were more: everything is dropped when the directory is back

}

// maxOwed bounds the deletes that a directory remembers while it cannot be written.
const maxOwed = 1 << 16

func newDir(s *Store, i int) (*dir, error) {
	o := &s.o.Dirs[i]
	d := &dir{
		s: s, path: o.Path, limit: o.Bytes, salt: stableHash([]byte(o.Path)), weight: float64(o.Bytes),
		reads: make(chan *run), turn: make(chan struct{}, 1), wake: make(chan struct{}, 1),
		changed: make(chan struct{}),
		lockFD:  -1, state: StateMissing, reason: errNotOpened, pending: map[tag]*record{},
	}
	d.work = sync.NewCond(&d.mu)
	return d, d.takeMemory()
}

// takeMemory maps the memory of pieces and reads in one, so that all of it can be in huge pages.
func (d *dir) takeMemory() (err error) {
	o := &d.s.o
	// As many pieces are filled as are written.
	pieces, piece, read := 2*o.WriteDepth+2, int64(o.WriteBytes), runBytes(int64(o.ReadBytes))
	d.memory, err = mapMemory(int64(pieces)*piece + int64(o.ReadDepth)*read)
	if err != nil {
		return err
	}
	rest := d.memory
	for range pieces {
		d.free = append(d.free, rest[:piece:piece])
		rest = rest[piece:]
	}
	for range o.ReadDepth {
		d.readMemory = append(d.readMemory, rest[:read:read])
		rest = rest[read:]
	}
	return nil
}

var errNotOpened = errors.New("not opened yet")

func (d *dir) freeMemory() error {
	memory := d.memory
	d.memory, d.free, d.readMemory = nil, nil, nil
	return unmap(memory)
}

// start starts the directory's goroutines. stop ends them, and Store.Close waits for them.
func (d *dir) start() {
	d.openQueue()
	for i := range d.s.o.WriteDepth {
		d.s.work.Go(func() { d.write(i) })
	}
	for i := range d.s.o.ReadDepth {
		d.s.work.Go(func() { d.read(i) })
	}
	d.s.keepers.Go(d.keep)
	d.wakeKeeper()
}

func (d *dir) openQueue() {
	var err error
	if d.queue, err = openQueue(d.path, d.s.o.ReadDepth+d.s.o.WriteDepth, d.s.o.faults); err != nil {
		d.mu.Lock()
		d.notifyLater(err)
		d.mu.Unlock()
	}
}

// stop ends the goroutines once no call runs any more; accepted blocks are written first.
func (d *dir) stop() {
	d.mu.Lock()
	d.stopping = true
	d.work.Broadcast()
	d.mu.Unlock()
	close(d.reads)
}

// shut closes the segments with their footers, and the files, after the goroutines have ended.
func (d *dir) shut() error {
	if d.opened {
		d.removeNext()
		d.abandon()
		d.closeEnded()
	}
	d.notify()
	return errors.Join(d.detach(), d.queue.close(), d.freeMemory())
}

// removeNext removes the segment that was prepared and not written to.
func (d *dir) removeNext() {
	if g := d.next; g != nil {
		d.next = nil
		d.drop(g)
	}
}

// broadcast wakes all that wait for room. With the lock held.
func (d *dir) broadcast() {
	close(d.changed)
	d.changed = make(chan struct{})
	d.work.Broadcast()
}

func (d *dir) wakeKeeper() {
	select {
	case d.wake <- struct{}{}:
	default: // it is awake
	}
}

// abandon ends the open segment: the current piece goes to the writers, and nothing more is added.
// With the lock held.
func (d *dir) abandon() {
	d.seal()
	if d.writing != nil {
		d.end(d.writing)
	}
	d.wakeKeeper()
}

// end takes a segment out of writing. Its footer is written later. With the lock held.
func (d *dir) end(g *segment) {
	d.ended = append(d.ended, g)
	d.writing = nil
	d.wakeKeeper()
}

// tagOf returns a key's tag in this process.
func (s *Store) tagOf(k *pool.Key) tag {
	b := keyBytes(k)
	return tag{maphash.Bytes(s.seeds[0], b[:]), maphash.Bytes(s.seeds[1], b[:])}
}
