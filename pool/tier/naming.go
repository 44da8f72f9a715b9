package tier

import (
	"fmt"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/tier/catalog"
	"github.com/kvagent/kvagent/pool/tier/names"
)

// openNames opens the names of spaces in the levels.
func (p *Pool) openNames() (err error) {
	o := names.Options{
		File:          p.o.file,
		EpochEvery:    p.o.EpochEvery,
		CollectAfter:  p.o.CollectAfter,
		CollectUnused: p.o.CollectUnused,
		CollectRate:   p.o.CollectRate,
		Node:          p.o.Node,
		Clock:         p.o.Clock,
		Log:           func(what string, err error) { p.o.Log("", what, err) },
		Resetting:     p.resetting,
		Changed:       p.renamed,
		Adopted:       p.adopted,
	}
	if o.File == nil && p.o.State != "" {
		o.File = catalog.File(p.o.State)
	}
	tiers := make([]names.Tier, len(p.levels))
	for i, l := range p.levels {
		tiers[i] = names.Tier{
			Name: l.Name, Store: l.Store, Local: l.Local, Within: l.PutWithin,
			Up: l.up, Busy: l.busy, Deleted: l.forgetKeys, Log: l.logLimited,
		}
	}
	_, o.Lasting = p.memory.(pool.Forgetter)
	if p.names, err = names.Open(o, tiers); err != nil {
		return err
	}
	for _, fp := range p.names.Unforgotten() {
		if err := p.forgetMemory(fp); err != nil {
			return fmt.Errorf("tier: resetting what memory has of a space that was reset: %w", err)
		}
	}
	return nil
}

// busy reports whether look-ups or fetches wait for the store.
func (l *level) busy() bool {
	l.p.mu.Lock()
	defer l.p.mu.Unlock()
	return l.fetches.n > 0 || len(l.questions) > 0
}

// forgetKeys removes keys that were deleted from what is cached about the store.
func (l *level) forgetKeys(keys []pool.Key) {
	for i := range keys {
		k := &keys[i]
		digest := (&era{stored: k.Space}).digest(k.Group, k.Hash.Bytes[:k.Hash.Len])
		l.written.forget(digest)
		if !l.Local {
			l.exists.forget(digest)
		}
	}
}
