package disk

import (
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
	MaxSegmentBytes = 4 << 30
	MinWriteBytes   = 16 << 10
	MaxWriteBytes   = 256 << 20
	MaxWriteDepth   = 16
	MaxReadDepth    = 1024
	MinSegments     = 4       // that a directory must have room for
	MaxSegments     = 1 << 14 // of a directory; each costs a file descriptor
	MaxDirBytes     = 1 << 46

	probeMax     = time.Minute
	segmentShare = 128 // by default a segment is this share of the smallest directory
)

// Dir is one directory, preferably on a device of its own.
type Dir struct {
	Path string
	// Bytes of disk that the store may use there, all files together. It evicts before it would
	// exceed that.
	Bytes int64
}

// Options of a store. A zero value means the default, where there is one.
type Options struct {
	Dirs []Dir // 1 to MaxDirs

	// SegmentBytes is the size of a segment file, MinSegmentBytes to MaxSegmentBytes; default 1/128
	// of the smallest directory, 16 MiB to 256 MiB where that fits.
	SegmentBytes int64
	// WriteBytes is the largest size of a write, MinWriteBytes to MaxWriteBytes and at most half a
	// segment; a larger block is not stored; default 8 MiB.
	WriteBytes int
	WriteDepth int // writes at once in each directory, 1 to MaxWriteDepth; default 8
	ReadDepth  int // reads at once in each directory, 1 to MaxReadDepth; default 32

	// OnState is called with the reason when a directory changes its state, and once with
	// ErrBuffered where the page cache is used. It must not call the store. It may be nil.
	OnState func(path string, from, to State, reason error)

	probeEvery time.Duration // first wait before a lost directory is tried again, doubled up to probeMax
	faults     faults        // injected by tests between the store and the file system
}

func (o *Options) setDefaults() {
	least := int64(MaxDirBytes)
	for i := range o.Dirs {
		least = min(least, o.Dirs[i].Bytes)
	}
	orElse(&o.SegmentBytes, max(
		MinSegmentBytes,
		min(256<<20, max(least/segmentShare, 16<<20, 2*int64(o.WriteBytes)), least/(2*MinSegments))&^(pageBytes-1),
	))
	orElse(&o.WriteBytes, int(min(8<<20, o.SegmentBytes/2&^(pageBytes-1))))
	orElse(&o.WriteDepth, 8)
	orElse(&o.ReadDepth, 32)
	orElse(&o.probeEvery, time.Second)
}

func orElse[T comparable](value *T, other T) {
	if *value == *new(T) {
		*value = other
	}
}

func (o *Options) check() error {
	for _, r := range []struct {
		name             string
		value, low, high int64
	}{
		{"the number of Dirs", int64(len(o.Dirs)), 1, MaxDirs},
		{"SegmentBytes", o.SegmentBytes, MinSegmentBytes, MaxSegmentBytes},
		{"WriteBytes", int64(o.WriteBytes), MinWriteBytes, min(MaxWriteBytes, o.SegmentBytes/2)},
		{"WriteDepth", int64(o.WriteDepth), 1, MaxWriteDepth},
		{"ReadDepth", int64(o.ReadDepth), 1, MaxReadDepth},
	} {
		if r.value < r.low || r.value > r.high {
			return fmt.Errorf("disk: %s is %d, must be %d to %d", r.name, r.value, r.low, r.high)
		}
	}
	if o.SegmentBytes%pageBytes != 0 || o.WriteBytes%pageBytes != 0 {
		return fmt.Errorf("disk: SegmentBytes is %d and WriteBytes %d, must be a multiple of %d", o.SegmentBytes,
			o.WriteBytes, pageBytes)
	}
	return o.checkDirs()
}

func (o *Options) checkDirs() error {
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
	evicted      // blocks, with their segment
	writtenAgain // blocks that were not, because they had been read
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
	evicted: "evicted", writtenAgain: "written_again", stateChanges: "state_changes", recovered: "recovered",
	damaged: "damaged", scanned: "scanned",
}

// Stats is a snapshot of a store.
type Stats struct {
	Blocks     int64 // in the index
	IndexBytes int64 // memory of the index
	Dirs       []DirStats
	counts     [counters]uint64
}

// DirStats is the state of one directory.
type DirStats struct {
	Path     string
	State    State
	Reason   string // of a state other than StateOK
	Direct   bool   // false: the file system cannot do O_DIRECT, and the page cache is used
	Taken    int64  // bytes of disk
	Capacity int64  // bytes of disk allowed
	Segments int
}

func (s *Store) add(c counter, n int) { s.count[c].Add(uint64(n)) }

// Stats returns a snapshot. It may be called at any time, also after Close.
func (s *Store) Stats() Stats {
	var st Stats
	for c := range s.count {
		st.counts[c] = s.count[c].Load()
	}
	st.Blocks, st.IndexBytes = s.index.size()
	for _, d := range s.dirs {
		st.Dirs = append(st.Dirs, d.stats())
	}
	return st
}

func (d *dir) stats() DirStats {
	d.mu.Lock()
	defer d.mu.Unlock()
	st := DirStats{
		Path: d.path, State: d.state, Direct: true, Taken: d.taken, Capacity: d.limit, Segments: len(d.segments),
	}
	if d.state != StateOK && d.reason != nil {
		st.Reason = d.reason.Error()
	}
	for _, g := range d.segments {
		st.Direct = st.Direct && g.direct
	}
	return st
}

var _ pool.Reporter = (*Store)(nil)

// Report implements pool.Reporter. The state is that of the worst directory, which the reason
// names.
func (s *Store) Report() pool.StoreReport {
	st := s.Stats()
	r := pool.StoreReport{State: StateOK.String()}
	var worst State
	for i := range st.Dirs {
		if d := &st.Dirs[i]; d.State > worst {
			worst = d.State
			r.State, r.Reason = d.State.String(), d.Path+": "+d.Reason
		}
	}
	for c, name := range counterNames {
		r.Counts = append(r.Counts, pool.Count{Name: name, N: st.counts[c]})
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
