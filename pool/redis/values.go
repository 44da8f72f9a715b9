package redis

import (
	"context"
	"strconv"

	"github.com/redis/rueidis"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/remote"
)

// maxValue bounds a value, bytes: a Redis string has at most 512 MiB.
const maxValue = 512 << 20

func (s *Store) name(k *pool.Key) string { return remote.Name(s.o.Prefix, k) }

// readTo returns the command that reads a value from its first byte to byte last. The server sends
// no more than that, whatever is stored under the name.
func readTo(name string, last int) []string {
	return []string{"GETRANGE", name, "0", strconv.Itoa(last)}
}

// batches calls do for the valid items, with as many at once as make one pipeline.
func (s *Store) batches(
	ctx context.Context, items []pool.Item, do func(context.Context, []*pool.Item) error,
) error {
	var batch []*pool.Item
	room := s.o.BatchBytes
	for i := range items {
		it := &items[i]
		if !remote.Valid(&it.Key) || len(it.Data) > maxValue {
			it.Status = pool.Invalid
			continue
		}
		if room -= int64(len(it.Data)); room < 0 && len(batch) > 0 {
			if err := do(ctx, batch); err != nil {
				return err
			}
			batch, room = batch[:0], s.o.BatchBytes-int64(len(it.Data))
		}
		batch = append(batch, it)
	}
	if err := do(ctx, batch); err != nil {
		return err
	}
	return ctx.Err()
}

// Put implements pool.Store. Busy is an item that the server had no room for, or refused.
func (s *Store) Put(ctx context.Context, items []pool.Item) error {
	return s.batches(ctx, items, s.putBatch)
}

// putBatch stores items unless they are stored already.
func (s *Store) putBatch(ctx context.Context, items []*pool.Item) error {
	commands := make([][]string, len(items))
	for i, it := range items {
		it.Status = pool.Busy
		// A copy, since the client may still send it after ctx has ended.
		commands[i] = []string{"SET", s.name(&it.Key), string(it.Data), "NX"}
		if it.Key.Space != pool.EpochMarkers {
			commands[i] = append(commands[i], "PX", strconv.FormatInt(s.o.TTL.Milliseconds(), 10))
		}
	}
	results, err := s.do(ctx, commands)
	for i, r := range results {
		switch err := r.Error(); {
		case err == nil:
			items[i].Status = pool.OK
			s.condition.Set(remote.OK, nil)
		case rueidis.IsRedisNil(err):
			items[i].Status = pool.Exists
		case isFull(err):
			s.count[countFull].Add(1)
			s.condition.Set(remote.Full, err)
		default:
			s.count[countFailed].Add(1)
		}
	}
	return err
}

// Get implements pool.Store. Missing is a key that does not exist, Corrupt a value of another
// length or type, Busy one that the server refused or has not answered.
func (s *Store) Get(ctx context.Context, items []pool.Item) error {
	return s.batches(ctx, items, s.getBatch)
}

func (s *Store) getBatch(ctx context.Context, items []*pool.Item) error {
	commands := make([][]string, len(items))
	for i, it := range items {
		it.Status = pool.Busy
		commands[i] = readTo(s.name(&it.Key), len(it.Data)) // one byte more than it should have
	}
	results, err := s.do(ctx, commands)
	if err != nil {
		return err
	}
	for i, it := range items {
		value, err := results[i].ToString()
		switch {
		case isError(err, "WRONGTYPE"):
			it.Status = pool.Corrupt
		case err != nil:
			s.count[countFailed].Add(1)
		case value == "": // as if it were missing
			it.Status = pool.Missing
		case len(value) != len(it.Data):
			it.Status = pool.Corrupt
		default:
			copy(it.Data, value)
			it.Status = pool.OK
		}
	}
	return nil // the status of every item is known
}

// Exists implements pool.Store: OK or Missing. It does not verify the value.
func (s *Store) Exists(ctx context.Context, keys []pool.Key, status []pool.Status) error {
	var commands [][]string
	asked := make([]int, 0, len(keys))
	for i := range keys {
		status[i] = pool.Missing
		if !remote.Valid(&keys[i]) {
			status[i] = pool.Invalid
			continue
		}
		asked = append(asked, i)
		commands = append(commands, []string{"EXISTS", s.name(&keys[i])})
	}
	results, err := s.do(ctx, commands)
	if err != nil {
		return err
	}
	for i, r := range results {
		if n, err := r.AsInt64(); err == nil && n > 0 {
			status[asked[i]] = pool.OK
		}
	}
	return ctx.Err()
}

// Delete implements pool.Store.
func (s *Store) Delete(ctx context.Context, keys []pool.Key) error {
	var commands [][]string
	for i := range keys {
		if remote.Valid(&keys[i]) {
			commands = append(commands, []string{"UNLINK", s.name(&keys[i])})
		}
	}
	_, err := s.do(ctx, commands)
	return err
}
