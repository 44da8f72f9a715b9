package redis

import (
	"context"

	"github.com/kvagent/kvagent/pool"
)

// check compares values with their headers. It deletes those that do not verify or have another
// length than asked for, so that they can be stored again.
func (s *Store) check(ctx context.Context, all []reading) error {
	var bad []pool.Key
	for i := range all {
		r := &all[i]
		switch {
		case r.item.Status != pool.Corrupt:
		case r.rest >= 0 && r.header != nil && pool.CheckValue(r.header, &r.item.Key, r.item.Data) == nil:
			r.item.Status = pool.OK
		default:
			s.count[countCorrupt].Add(1)
			bad = append(bad, r.item.Key)
		}
	}
	if len(bad) == 0 {
		return nil
	}
	err := s.Delete(ctx, bad)
	if ctx.Err() == nil {
		err = nil // the status of every item is known
	}
	return err
}
