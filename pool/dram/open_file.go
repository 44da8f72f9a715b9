package dram

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kvagent/kvagent/pool/dram/advisor"
	"github.com/kvagent/kvagent/pool/dram/arena"
	"github.com/kvagent/kvagent/pool/dram/offheap"
	"github.com/kvagent/kvagent/pool/dram/slab"
)

// Files of pools, this one's and others'. Package arena implements them; the rest of the module
// uses them through this package alone.
type (
	// FileInfo describes a pool's file found in a directory.
	FileInfo = arena.FileInfo
	// FileState is whether a process has a pool's file open.
	FileState = arena.FileState
	// HeldError names the process that has the file that Open was given.
	HeldError = arena.HeldError
)

// Live: a process has the file open. Abandoned: none has.
const (
	Live      = arena.Live
	Abandoned = arena.Abandoned
)

// ErrHeld matches every HeldError.
var ErrHeld = arena.ErrHeld

// ListFiles finds the pools' files in a directory. It skips other files, and files that this user
// may not read.
func ListFiles(dir string) ([]FileInfo, error) { return arena.ListFiles(dir) }

// RemoveFile removes a pool's file that no process has open, and frees its memory.
func RemoveFile(path string) error { return arena.RemoveFile(path) }

// openFile opens a pool whose file outlives the process.
func openFile(o *Options) (*Pool, error) {
	began := time.Now()
	f, a, err := arena.OpenFile(&arena.FileOptions{
		Path: o.Path, Bytes: o.Bytes, SlabBytes: o.SlabBytes, Seed: offheap.NewSeed(o.HashSeed), Now: o.Clock(),
	})
	if err != nil {
		return nil, err
	}
	r := &Recovery{Path: o.Path}
	r.New, r.Cold = f.State()
	page, _ := a.Page()
	adv := advisor.New(o.Policy, o.Clock)
	c, err := o.core(f, page, adv, r)
	if errors.Is(err, slab.ErrClash) || errors.Is(err, errLost) {
		r.Cold = err.Error()
		f.Erase()
		c, err = o.core(f, page, adv, r)
	}
	if err != nil {
		adv.Close()
		return nil, errors.Join(err, f.Unmap(), a.Close())
	}
	p := start(o, a, c)
	p.noter = startNoter(f, adv, o.FileFaults)
	r.Took = time.Since(began)
	p.info.Recovery = r
	return p, nil
}

// core builds the index of a file's content, empty if that cannot be used.
func (o *Options) core(f *arena.File, page int64, a *advisor.Advisor, r *Recovery) (*core, error) {
	c, err := newCore(o, page, f.Seed(), f)
	if err != nil {
		return nil, err
	}
	c.advisor = a
	for _, n := range f.BadPages() { // also of a file whose content is not used; no slab is cut yet
		c.slabs.Retire(n * page)
	}
	r.BadPages = int(c.slabs.BadStats().Pages)
	if r.New || r.Cold != "" {
		return c, nil
	}
	if err := a.Learn(f.SavedLearned); err != nil {
		r.Notes = append(r.Notes, fmt.Sprintf("what the eviction had learned is not used: %v", err))
	}
	if !f.Touch(func() { err = c.restore(f, o.SlabBytes, r) }) {
		err = errLost
	}
	if err != nil {
		return nil, errors.Join(err, c.close())
	}
	return c, nil
}

// noteInterval is how often a pool writes to its file that it is in use, and what its policy
// learned.
const noteInterval = 10 * time.Second

// fileNoter owns the file and writes these notes from a goroutine. It is nil if the pool has no
// file.
type fileNoter struct {
	file     *arena.File
	advisor  *advisor.Advisor
	tell     func(faults uint64) // may be nil
	reported uint64
	ending   chan struct{}
	done     sync.WaitGroup
}

func startNoter(f *arena.File, a *advisor.Advisor, tell func(faults uint64)) *fileNoter {
	k := &fileNoter{file: f, advisor: a, tell: tell, ending: make(chan struct{})}
	k.done.Go(k.run)
	return k
}

func (k *fileNoter) run() {
	every := time.NewTicker(noteInterval)
	defer every.Stop()
	for {
		select {
		case <-every.C:
			k.note()
		case <-k.ending:
			k.note()
			return
		}
	}
}

func (k *fileNoter) note() {
	if b := k.advisor.Learned(); b != nil {
		k.file.SaveLearned(b)
	}
	k.file.NoteAlive()
	if n := k.file.Faulted(); n > k.reported && k.tell != nil {
		k.reported = n
		k.tell(n)
	}
}

// close writes the notes once more and releases the file.
func (k *fileNoter) close() error {
	if k == nil {
		return nil
	}
	k.file.Unsign()
	close(k.ending)
	k.done.Wait()
	return k.file.Close()
}
