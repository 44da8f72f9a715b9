package disk

import (
	"sync/atomic"

	"github.com/kvagent/kvagent/pool"
)

// Stats is a snapshot of a store. Counts are since Open.
type Stats struct {
	Blocks     int64 // in the index
	IndexBytes int64 // memory of the index
	Dirs       []DirStats

	// items of Put; Busy counts all that were refused for now
	Stored, Existed, Busy, TooLarge uint64
	// items of Put that met a directory that cannot be written
	PutsLost              uint64
	Hits, Missed, Corrupt uint64 // items of Get; Corrupt ones were dropped
	// keys of Delete; those that could not be written at once
	Deletes, DeletesOwed uint64
	CallsRefused         uint64 // more than MaxPuts or MaxGets at once

	Writes, WrittenBytes, Reads, ReadBytes uint64 // of the medium
	WriteErrors, ReadErrors                uint64
	// reads and writes that held a thread, because the kernel had no asynchronous ones
	InThreads uint64
	// blocks evicted with their segment; blocks written again instead, and their bytes
	Evicted, WrittenAgain, AgainBytes uint64
	SegmentsDropped                   uint64
	StateChanges, Probes, IndexFull   uint64
	Recovered, Damaged                uint64 // at start: blocks found; records whose bytes did not fit
	Scanned, RecoveryRead             uint64 // segments without a footer; bytes read
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
	Owed     int // deletes still to be written
}

type counters struct {
	stored, existed, busy, tooLarge, putsLost             atomic.Uint64
	hits, missed, corrupt                                 atomic.Uint64
	deletes, deletesOwed, callsRefused                    atomic.Uint64
	writes, written, reads, read, writeErrors, readErrors atomic.Uint64
	inThreads                                             atomic.Uint64
	evicted, again, againBytes, segmentsDropped           atomic.Uint64
	stateChanges, probes, indexFull                       atomic.Uint64
	recovered, damaged, scanned, recoveryRead             atomic.Uint64
}

func (c *counters) put(s pool.Status) {
	switch s {
	case pool.OK:
		c.stored.Add(1)
	case pool.Exists, pool.InProgress:
		c.existed.Add(1)
	case pool.Busy:
		c.busy.Add(1)
	}
}

func (c *counters) get(it *pool.Item) {
	switch it.Status {
	case pool.OK:
		c.hits.Add(1)
	case pool.Corrupt:
		c.corrupt.Add(1)
	case pool.Missing:
		c.missed.Add(1)
	}
}

// Stats returns a snapshot. It may be called at any time, also after Close.
func (s *Store) Stats() Stats {
	c := &s.count
	st := Stats{
		Stored: c.stored.Load(), Existed: c.existed.Load(), Busy: c.busy.Load(),
		TooLarge: c.tooLarge.Load(), PutsLost: c.putsLost.Load(), Hits: c.hits.Load(), Missed: c.missed.Load(),
		Corrupt: c.corrupt.Load(),
		Deletes: c.deletes.Load(), DeletesOwed: c.deletesOwed.Load(), CallsRefused: c.callsRefused.Load(),
		Writes: c.writes.Load(), WrittenBytes: c.written.Load(), Reads: c.reads.Load(), ReadBytes: c.read.Load(),
		WriteErrors: c.writeErrors.Load(), ReadErrors: c.readErrors.Load(), InThreads: c.inThreads.Load(),
		Evicted: c.evicted.Load(), WrittenAgain: c.again.Load(),
		AgainBytes: c.againBytes.Load(), SegmentsDropped: c.segmentsDropped.Load(), StateChanges: c.stateChanges.Load(),
		Probes:    c.probes.Load(),
		IndexFull: c.indexFull.Load(), Recovered: c.recovered.Load(), Damaged: c.damaged.Load(),
		Scanned: c.scanned.Load(), RecoveryRead: c.recoveryRead.Load(),
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
		Owed: len(d.owed),
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
	r.Counts = []pool.Count{
		{Name: "too_large", N: st.TooLarge}, {Name: "calls_refused", N: st.CallsRefused},
		{Name: "puts_lost", N: st.PutsLost}, {Name: "write_errors", N: st.WriteErrors},
		{Name: "read_errors", N: st.ReadErrors},
		{Name: "in_threads", N: st.InThreads}, {Name: "index_full", N: st.IndexFull},
		{Name: "bytes_written", N: st.WrittenBytes}, {Name: "bytes_read", N: st.ReadBytes},
		{Name: "evicted", N: st.Evicted}, {Name: "written_again", N: st.WrittenAgain},
		{Name: "deletes_owed", N: st.DeletesOwed}, {Name: "state_changes", N: st.StateChanges},
		{Name: "recovered", N: st.Recovered}, {Name: "damaged", N: st.Damaged},
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
