package dram

import (
	"errors"
	"fmt"
	"time"

	"github.com/kvagent/kvagent/pool/dram/arena"
	"github.com/kvagent/kvagent/pool/dram/slab"
)

// openKept opens a pool whose file outlives it.
func openKept(o *Options) (*Pool, error) {
	began := time.Now()
	f, a, err := arena.OpenFile(&arena.FileOptions{Path: o.Path, Bytes: o.Bytes, SlabBytes: o.SlabBytes, Seed: newSeed(o.HashSeed), Now: o.Clock()})
	if err != nil {
		return nil, err
	}
	r := &Recovery{Path: o.Path}
	r.New, r.Cold = f.State()
	page, _ := a.Page()
	adv := newAdvisor(o.Policy, o.Clock)
	c, err := o.core(f, page, adv, r)
	if errors.Is(err, slab.ErrClash) || errors.Is(err, errLost) {
		r.Cold = err.Error()
		f.Erase()
		c, err = o.core(f, page, adv, r)
	}
	if err != nil {
		adv.close()
		return nil, errors.Join(err, f.GiveUp(), a.Close())
	}
	p := start(o, a, c)
	p.keeper = startKeeper(f, adv, o.FileFaults)
	r.Took = time.Since(began)
	p.info.Recovery = r
	return p, nil
}

// core is the index of what is in a file, empty if that cannot be used.
func (o *Options) core(f *arena.File, page int64, a *advisor, r *Recovery) (*core, error) {
	c, err := newCore(o, page, f.Seed(), f)
	if err != nil {
		return nil, err
	}
	c.advisor = a
	for _, n := range f.BadPages() { // of a file whose content is not used, too; no slab is cut yet
		c.slabs.Retire(n * page)
	}
	r.BadPages = int(c.slabs.BadStats().Pages)
	if r.New || r.Cold != "" {
		return c, nil
	}
	if err := a.learn(f); err != nil {
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
