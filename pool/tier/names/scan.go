package names

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/kvagent/kvagent/pool"
)

// Limits of one scan, so that it does not slow down look-ups and fetches of the store.
const (
	collectAtOnce  = 16               // keys of one Delete
	collectSilence = time.Minute      // after which a listing without progress is cancelled
	collectMarks   = 10 * time.Second // between two reads of use marks
	collectYield   = 100              // at most so many times 10 ms between two calls
)

var errCollectSilent = errors.New("its listing makes no progress")

// scan is one scan of a tier for some names.
type scan struct {
	t     *tier
	names []pool.Fingerprint
	marks time.Time   // when use marks were last read
	alive *time.Timer // cancels the scan when it fires
	keys  []pool.Key
	bytes []int64
	debt  time.Duration // pause owed to CollectRate
}

// collect deletes what a tier holds under orphans, if it can list its contents, and the epoch
// markers that no node needs any more.
func (t *tier) collect(ctx context.Context, names []pool.Fingerprint) error {
	if t.canList() {
		list, cancel := context.WithCancelCause(ctx)
		defer cancel(nil)
		c := &scan{t: t, names: names, marks: t.names.now()}
		c.alive = time.AfterFunc(collectSilence, func() { cancel(errCollectSilent) })
		defer c.alive.Stop()
		if err := c.list(list, names); err != nil {
			return errors.Join(err, context.Cause(list))
		}
		if err := c.delete(list); err != nil {
			return errors.Join(err, context.Cause(list))
		}
	}
	if t.Local {
		return nil
	}
	keys := t.names.staleMarkers(t, names)
	for len(keys) > 0 {
		n := min(len(keys), followKeys)
		within, stop := context.WithTimeout(ctx, t.Within)
		err := t.Store.Delete(within, keys[:n])
		stop()
		if err != nil {
			return err
		}
		keys = keys[n:]
	}
	return nil
}

// list lists what the store holds under names, and deletes it on the way.
func (c *scan) list(ctx context.Context, names []pool.Fingerprint) error {
	found := func(k pool.Key, bytes int64) {
		c.keys, c.bytes = append(c.keys, k), append(c.bytes, bytes)
	}
	if some, can := c.t.Store.(pool.SpaceLister); can {
		return some.ListSpaces(ctx, names, func(n int) error { return c.progress(ctx, n) }, found)
	}
	var failed error
	err := c.t.Store.(pool.Lister).List(ctx, func(k pool.Key, bytes int64) bool {
		if slices.Contains(names, k.Space) {
			found(k, bytes)
		}
		failed = c.progress(ctx, 1)
		return failed == nil
	})
	return errors.Join(err, failed)
}

// progress deletes what was found since the last call and paces the scan. It also reads the use
// marks again from time to time, and spares what another node uses by then.
func (c *scan) progress(ctx context.Context, n int) error {
	c.alive.Stop()
	defer c.alive.Reset(collectSilence)
	if now := c.t.names.now(); now.Sub(c.marks) >= collectMarks {
		c.marks = now
		if _, err := c.t.withoutUseMarks(ctx, c.names); err != nil {
			return err
		}
	}
	if err := c.delete(ctx); err != nil {
		return err
	}
	return c.pace(ctx, n)
}

// delete deletes what was found and is still to be deleted.
func (c *scan) delete(ctx context.Context) error {
	for len(c.keys) > 0 {
		n := min(len(c.keys), collectAtOnce)
		keys, shards, bytes := c.t.names.stillOrphaned(c.t, c.keys[:n], c.bytes[:n])
		c.yield(ctx)
		within, stop := context.WithTimeout(ctx, c.t.Within)
		err := c.t.Store.Delete(within, keys)
		stop()
		if err != nil {
			return err
		}
		c.t.Deleted(keys)
		c.t.count.collected.Add(uint64(shards))
		c.t.count.collectedBytes.Add(uint64(bytes))
		c.keys, c.bytes = c.keys[n:], c.bytes[n:]
		if err := c.pace(ctx, n); err != nil {
			return err
		}
	}
	c.keys, c.bytes = c.keys[:0], c.bytes[:0]
	return nil
}

// pace pauses so that at most CollectRate keys a second are examined or deleted.
func (c *scan) pace(ctx context.Context, n int) error {
	c.debt += time.Duration(n) * time.Second / time.Duration(c.t.names.o.CollectRate)
	if c.debt >= 5*time.Millisecond {
		pause(ctx, c.debt)
		c.debt = 0
	}
	return ctx.Err()
}

// yield lets queued look-ups and fetches of the store go first, for at most a second.
func (c *scan) yield(ctx context.Context) {
	for range collectYield {
		if !c.t.Busy() || !pause(ctx, 10*time.Millisecond) {
			return
		}
	}
}
