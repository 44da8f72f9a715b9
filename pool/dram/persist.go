package dram

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram/arena"
	"github.com/kvagent/kvagent/pool/dram/offheap"
)

// These methods write the state of a slot to the pool's file. The order matters: a header is
// written after the bytes and before the slot is reported stored; it is cleared before the slot can
// be given to another entry.

// header returns the file's header of a used slot.
func (c *core) header(slot uint32) *arena.Header { return c.file.Header(slot) }

// persistShard writes the header of a shard whose bytes are complete.
func (c *core) persistShard(e, slot uint32, shard uint8, sum uint32) {
	if c.file == nil {
		return
	}
	r := &c.recs.All[e]
	sp := c.realms[r.ident.realm()].space
	if sp.record == noRecord {
		return
	}
	c.file.Touch(func() {
		h := c.header(slot)
		h.Block = arena.Block{
			Hash: r.hash.Words(), HashLen: uint32(r.ident.hashLen()), Space: uint16(sp.record),
			Group: r.ident.group(), Shard: shard, Turn: sp.turn, Sum: sum,
		}
		h.Used.Store(c.file.Tick)
		h.Check.Store(h.SumOf(slot))
	})
}

// clearHeaders marks the slots of an entry as free in the file.
func (c *core) clearHeaders(e uint32) {
	if c.file == nil {
		return
	}
	for slot := c.recs.All[e].head; slot&upward == 0; slot = c.slabs.at(slot).link {
		c.file.Touch(func() { c.header(slot).Check.Store(0) })
	}
}

// persistParent writes the parent of e; none clears it.
func (c *core) persistParent(e, parent uint32) {
	if c.file == nil {
		return
	}
	var w uint64
	if parent != none {
		p := &c.recs.All[parent]
		w = arena.ParentOf(p.head, p.hash.Tag())
	}
	c.file.Touch(func() { c.header(c.recs.All[e].head).Parent.Store(w) })
}

// tick sets the clock that persistShard and Unpin write.
func (c *core) tick() {
	if f := c.file; f != nil {
		f.SetTime(c.now())
	}
}

// nextTurn starts a new turn of a space in the file: nothing older is restored.
func (c *core) nextTurn(sp *space) {
	if f := c.file; f != nil && sp.record != noRecord {
		if !f.Touch(func() { sp.turn = f.SpaceAt(sp.record).NextTurn() }) {
			sp.record = noRecord // its record is lost, with everything stored under it
		}
	}
}

// noRecord marks a space without a record in the file.
const noRecord = -1

// persistSpace assigns an opened space a record in the file. A space without one, for
// which there is no room, works, and ends with the process (Options.SpaceNotKept).
func (c *core) persistSpace(sp *space) {
	sp.record = noRecord
	f := c.file
	if f == nil {
		return
	}
	b, fits := arena.EncodeSpec(&sp.spec)
	if !fits {
		return
	}
	n, ok := f.FreeRecord()
	if !ok {
		if n, ok = c.forgetUnopened(); !ok {
			return
		}
	}
	if f.Touch(func() {
		r := f.SpaceAt(n)
		sp.turn = r.NextTurn()
		r.Write(b)
	}) {
		sp.record = n
	}
}

// forgetUnopened frees the record of a space without entries that this process has not opened.
func (c *core) forgetUnopened() (n int, ok bool) {
	for print, sp := range c.unopened {
		if c.realms[sp.realm].entries > 0 {
			continue
		}
		delete(c.unopened, print)
		c.end(sp.realm)
		return sp.record, true
	}
	return 0, false
}

// HeldError is of a file that others have.
type HeldError = arena.HeldError

// ErrNoMemory is for memory that the machine has, and that is in use now.
var ErrNoMemory = arena.ErrNoMemory

// openFile opens a pool whose file outlives the process.
func openFile(o *Options) (*Pool, error) {
	began := time.Now()
	f, a, err := arena.OpenFile(&arena.FileOptions{
		Path: o.Path, Abandon: o.Abandon, Bytes: o.Bytes, SlabBytes: o.SlabBytes,
		Seed: offheap.NewSeed(o.HashSeed), Now: o.Clock(),
	})
	if err != nil {
		return nil, err
	}
	r := &Recovery{Path: o.Path}
	r.New, r.Cold = f.State()
	page, _ := a.Page()
	c, err := o.core(f, page, r)
	if err != nil {
		return nil, errors.Join(err, a.Close(), f.Close())
	}
	p := start(o, a, c)
	p.keeper = startKeeper(f, o.Advisor)
	r.Took = time.Since(began)
	p.info.Recovery = r
	return p, nil
}

// core builds the index of a file's content, empty if that cannot be used.
func (o *Options) core(f *arena.File, page int64, r *Recovery) (*core, error) {
	c, err := newCore(o, page, f.Seed(), f)
	if err != nil {
		return nil, err
	}
	if r.New || r.Cold != "" {
		return c, nil
	}
	if learned := f.SavedLearned(); learned != nil && c.advisor != nil {
		if err := c.advisor.Learn(learned); err != nil {
			r.Notes = append(r.Notes, fmt.Sprintf("what the eviction had learned is not used: %v", err))
		}
	}
	if !f.Touch(func() { c.restore(f, o.SlabBytes, r) }) {
		return nil, errors.Join(errLost, c.close())
	}
	return c, nil
}

// saveEvery is how often a pool saves in its file what its policy has learned.
const saveEvery = 10 * time.Second

// fileKeeper owns the file, and saves there what the policy has learned; nil: there is no file.
type fileKeeper struct {
	file   *arena.File
	ending chan struct{}
	done   sync.WaitGroup
}

func startKeeper(f *arena.File, a pool.Advisor) *fileKeeper {
	k := &fileKeeper{file: f, ending: make(chan struct{})}
	if a != nil {
		k.done.Go(func() { k.run(a) })
	}
	return k
}

func (k *fileKeeper) run(a pool.Advisor) {
	every := time.NewTicker(saveEvery)
	defer every.Stop()
	for ended := false; !ended; {
		select {
		case <-every.C:
		case <-k.ending:
			ended = true
		}
		if b := a.Learned(); b != nil {
			k.file.SaveLearned(b)
		}
	}
}

// close saves once more and releases the file.
func (k *fileKeeper) close() error {
	if k == nil {
		return nil
	}
	close(k.ending)
	k.done.Wait()
	return k.file.Close()
}
