package disk

import (
	"cmp"
	"fmt"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvagent/kvagent/pool"
)

// Limits of the options.
const (
	MaxDirs         = 64
	MinSegmentBytes = 256 << 10
	MinSegments     = 4       // that a directory must have room for
	MaxSegments     = 1 << 14 // of a directory; each costs a file descriptor
	MaxDirBytes     = 1 << 46

	probeMax     = time.Minute
	segmentShare = 128 // by default a segment is this share of the smallest directory
)

// Dir is one directory, preferably on a device of its own.
type Dir struct {
	Path string
	// Bytes of disk that the store may use there. It evicts before it would exceed that.
	Bytes int64
}

// Options of a store. A zero value means the default, where there is one.
type Options struct {
	Dirs []Dir // 1 to MaxDirs

	// SegmentBytes is the size of a segment file, in whole pages; default 1/128 of the smallest
	// directory, 16 MiB to 256 MiB where that fits.
	SegmentBytes int64
	// WriteBytes is the largest size of a write, in whole pages and at most half a segment; a
	// larger block is not stored; default 8 MiB.
	WriteBytes int
	WriteDepth int // writes at once in each directory; default 8
	ReadDepth  int // reads at once in each directory; default 32

	// OnState is called with the reason when a directory changes its state. It must not call the
	// store. It may be nil.
	OnState func(path string, from, to State, reason error)

	probeEvery time.Duration // first wait before a lost directory is tried again, doubled up to probeMax
	faults     faults        // injected by tests between the store and the file system
}

func (o *Options) setDefaults() {
	least := int64(MaxDirBytes)
	for i := range o.Dirs {
		least = min(least, o.Dirs[i].Bytes)
	}
	o.SegmentBytes = cmp.Or(o.SegmentBytes, max(
		MinSegmentBytes,
		min(256<<20, max(least/segmentShare, 16<<20, 2*int64(o.WriteBytes)), least/(2*MinSegments))&^(pageBytes-1),
	))
	o.WriteBytes = cmp.Or(o.WriteBytes, int(min(8<<20, o.SegmentBytes/2&^(pageBytes-1))))
	o.WriteDepth = cmp.Or(o.WriteDepth, 8)
	o.ReadDepth = cmp.Or(o.ReadDepth, 32)
	o.probeEvery = cmp.Or(o.probeEvery, time.Second)
}

func (o *Options) check() error {
	if n := len(o.Dirs); n < 1 || n > MaxDirs {
		return fmt.Errorf("disk: the number of Dirs is %d, must be 1 to %d", n, MaxDirs)
	}
	seen := map[string]bool{}
	for i := range o.Dirs {
		d := &o.Dirs[i]
		if !filepath.IsAbs(d.Path) {
			return fmt.Errorf("disk: Dirs[%d].Path is %q, must be an absolute path", i, d.Path)
		}
		d.Path = filepath.Clean(d.Path)
		if seen[d.Path] {
			return fmt.Errorf("disk: Dirs has %s twice", d.Path)
		}
		seen[d.Path] = true
		low, high := MinSegments*o.SegmentBytes, min(MaxDirBytes, MaxSegments*o.SegmentBytes)
		if d.Bytes < low || d.Bytes > high {
			return fmt.Errorf(
				"disk: Dirs[%d].Bytes is %d, must be %d to %d with segments of %d", i, d.Bytes, low, high,
				o.SegmentBytes,
			)
		}
	}
	return nil
}

// counter is a count of events since Open.
type counter int

const (
	tooLarge     counter = iota // items of Put
	putsLost                    // items of Put that met a directory that cannot be written
	corrupt                     // items of Get whose bytes did not verify; they were dropped
	writtenBytes                // of the medium
	writeErrors
	readBytes // of blocks
	readErrors
	evicted // blocks, with their segment
	stateChanges
	indexFull // blocks that the index had no memory for
	recovered // blocks found when a directory was opened
	damaged   // records of then whose bytes did not verify
	scanned   // segments of then without a footer
	counters
)

// counterNames are the names of the counts in a Report.
var counterNames = [counters]string{
	tooLarge: "too_large", putsLost: "puts_lost", corrupt: "corrupt", writeErrors: "write_errors",
	readErrors: "read_errors", indexFull: "index_full", writtenBytes: "bytes_written", readBytes: "bytes_read",
	evicted: "evicted", stateChanges: "state_changes", recovered: "recovered",
	damaged: "damaged", scanned: "scanned",
}

func (s *Store) add(c counter, n int) { s.count[c].Add(uint64(n)) }

var _ pool.Reporter = (*Store)(nil)

// Report implements pool.Reporter: the state of the worst directory, which the reason names.
func (s *Store) Report() pool.StoreReport {
	r := pool.StoreReport{State: StateOK.String()}
	var worst State
	for _, d := range s.dirs {
		d.mu.Lock()
		if d.state > worst {
			worst = d.state
			r.State, r.Reason = d.state.String(), fmt.Sprintf("%s: %v", d.path, d.reason)
		}
		d.mu.Unlock()
	}
	for c, name := range counterNames {
		r.Counts = append(r.Counts, pool.Count{Name: name, N: s.count[c].Load()})
	}
	return r
}

// Usage returns the bytes on the disk and the blocks in the index; the capacity is that of the
// directories that are not missing.
func (s *Store) Usage() pool.Usage {
	var u pool.Usage
	u.Items, _ = s.index.size()
	for _, d := range s.dirs {
		d.mu.Lock()
		u.Bytes += d.taken
		if d.state != StateMissing {
			u.Capacity += d.limit
		}
		d.mu.Unlock()
	}
	return u
}

// maxNotes bounds the keys that wait to be taken: 52 bytes each, in two lists.
const maxNotes = 1 << 14

// notes are the keys that came or went. Its lock is the last of all.
type notes struct {
	on atomic.Bool // false: nothing is noted

	mu     sync.Mutex
	list   []pool.Key
	lost   bool
	signal func()
}

// note notes a key that has come or gone. It is called after the index has changed, so that a
// caller who takes the note finds the change.
func (n *notes) note(k *pool.Key) {
	if !n.on.Load() {
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if len(n.list) == maxNotes {
		n.lost = true
	} else {
		n.list = append(n.list, *k)
	}
	n.signal()
}

// noteAll notes that any key may have come or gone.
func (n *notes) noteAll() {
	if !n.on.Load() {
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.lost = true
	n.signal()
}

var _ pool.KeyJournal = (*Store)(nil)

// Watch implements pool.KeyJournal.
func (s *Store) Watch(signal func()) {
	s.notes.mu.Lock()
	defer s.notes.mu.Unlock()
	s.notes.signal = signal
	s.notes.on.Store(true)
}

// Changes implements pool.KeyJournal.
func (s *Store) Changes(empty []pool.Key) (all []pool.Key, lost bool) {
	n := &s.notes
	n.mu.Lock()
	defer n.mu.Unlock()
	all, lost = n.list, n.lost
	n.list, n.lost = empty[:0], false
	return all, lost
}
