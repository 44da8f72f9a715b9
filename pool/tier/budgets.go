package tier

import (
	"errors"

	"github.com/kvagent/kvagent/pool"
)

var _ pool.Budgets = (*Pool)(nil)

var errNoBudgets = errors.New("tier: the memory has no budgets")

// OpenOwner implements pool.Budgets for memory: what a tier has belongs to nobody.
func (p *Pool) OpenOwner(name string) (pool.Owner, error) {
	if b, ok := p.memory.(pool.Budgets); ok {
		return b.OpenOwner(name)
	}
	return 0, errNoBudgets
}

// CloseOwner implements pool.Budgets.
func (p *Pool) CloseOwner(o pool.Owner) {
	if b, ok := p.memory.(pool.Budgets); ok {
		b.CloseOwner(o)
	}
}

// SetBudget implements pool.Budgets.
func (p *Pool) SetBudget(o pool.Owner, bytes int64) {
	if b, ok := p.memory.(pool.Budgets); ok {
		b.SetBudget(o, bytes)
	}
}
