package tier

import (
	"fmt"

	"github.com/kvagent/kvagent/pool/tier/catalog"
	"github.com/kvagent/kvagent/pool/tier/names"
)

// openNames opens the names of spaces in the levels.
func (p *Pool) openNames() (err error) {
	o := names.Options{
		File:       p.o.file,
		EpochEvery: p.o.EpochEvery,
		Node:       p.o.Node,
		Clock:      p.o.Clock,
		Log:        func(what string, err error) { p.o.Log("", what, err) },
		Resetting:  p.resetting,
		Changed:    p.renamed,
		Adopted:    p.adopted,
	}
	if o.File == nil && p.o.State != "" {
		o.File = catalog.File(p.o.State)
	}
	tiers := make([]names.Tier, len(p.levels))
	for i, l := range p.levels {
		tiers[i] = names.Tier{
			Name: l.Name, Store: l.Store, Local: l.Local, Within: l.PutWithin,
			Up: l.up, Log: l.logLimited,
		}
	}
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

// nameOf returns how an open space is stored in tiers. A private one is not.
func (p *Pool) nameOf(sp *space) names.Name {
	if sp.spec.Private {
		return names.Name{Off: true}
	}
	return p.names.Use(sp.spec.Fingerprint)
}
