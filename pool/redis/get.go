package redis

import (
	"context"
	"encoding/binary"
	"strconv"
	"time"

	"github.com/redis/rueidis"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/remote"
)

func millis(d time.Duration) string { return strconv.FormatInt(d.Milliseconds(), 10) }

// Get implements pool.Store. An item that the server refused is Missing.
func (s *Store) Get(ctx context.Context, items []pool.Item) error {
	for len(items) > 0 {
		n := s.fit(items)
		if err := s.getBatch(ctx, items[:n]); err != nil {
			return err
		}
		items = items[n:]
	}
	return ctx.Err()
}

// reading is a get in progress.
type reading struct {
	item   *pool.Item
	name   string
	header []byte
	nonce  uint64
	size   int  // bytes of a chunk
	rest   int  // chunks after the first; -1 if the value is not valid
	empty  bool // the server returned no byte
}

func (s *Store) getBatch(ctx context.Context, items []pool.Item) error {
	var commands [][]string
	asked := make([]reading, 0, len(items))
	for i := range items {
		it := &items[i]
		it.Status = pool.Missing
		if !remote.Valid(&it.Key) {
			it.Status = pool.Invalid
			continue
		}
		asked = append(asked, reading{item: it, name: s.name(&it.Key)})
		commands = append(commands, readUpTo(asked[len(asked)-1].name, headBytes+len(it.Data)))
	}
	results, err := s.do(ctx, commands)
	if err != nil {
		return err
	}
	for i := range asked {
		s.readHead(&asked[i], results[i])
	}
	if err := s.emptyOnes(ctx, asked); err != nil {
		return err
	}
	if err := s.getRest(ctx, asked); err != nil {
		return err
	}
	return s.check(ctx, asked)
}

// readUpTo returns the command that reads a value of at most n bytes. The server sends no more than
// that, whatever is stored under the name.
func readUpTo(name string, n int) []string { return []string{"GETRANGE", name, "0", strconv.Itoa(n)} }

// emptyOnes finds the items whose values exist and are empty, which GETRANGE does not distinguish
// from missing ones. They are Corrupt, since nothing could be stored over them.
func (s *Store) emptyOnes(ctx context.Context, asked []reading) error {
	var commands [][]string
	var of []*pool.Item
	for i := range asked {
		if asked[i].item.Status == pool.Missing && asked[i].empty {
			of = append(of, asked[i].item)
			commands = append(commands, []string{"EXISTS", asked[i].name})
		}
	}
	results, err := s.do(ctx, commands)
	for i, r := range results {
		if n, err := r.AsInt64(); err == nil && n > 0 {
			of[i].Status = pool.Corrupt
		}
	}
	return err
}

// readHead decodes the value stored under an item's name. An invalid one leaves rest at -1.
func (s *Store) readHead(r *reading, result rueidis.RedisResult) {
	r.rest = -1
	value, err := result.ToString()
	if err != nil {
		s.count[countFailed].Add(1)
		return
	}
	if r.empty = value == ""; r.empty {
		return
	}
	r.item.Status = pool.Corrupt
	if len(value) < headBytes {
		return
	}
	head := []byte(value[:headBytes])
	r.header = head[:pool.ValueHeader]
	length := len(r.item.Data)
	if pool.CheckValueHeader(r.header, &r.item.Key, length) != nil {
		return
	}
	r.nonce = binary.LittleEndian.Uint64(head[pool.ValueHeader:])
	r.size = int(binary.LittleEndian.Uint32(head[pool.ValueHeader+nonceBytes:]))
	if r.size < MinChunkBytes || r.size > MaxChunkBytes || len(value)-headBytes != min(length, r.size) {
		return
	}
	copy(r.item.Data, value[headBytes:])
	r.rest = chunks(length, r.size)
}

// getRest reads the chunks after the first of all items. A missing chunk makes its item Missing.
func (s *Store) getRest(ctx context.Context, all []reading) error {
	var commands [][]string
	for i := range all {
		for n := 1; n <= all[i].rest; n++ {
			size := len(chunk(all[i].item.Data, all[i].size, n))
			commands = append(commands, readUpTo(chunkName(all[i].name, all[i].nonce, n), size))
		}
	}
	results, err := s.do(ctx, commands)
	if err != nil {
		return err
	}
	for i := range all {
		r := &all[i]
		for n := 1; n <= r.rest; n++ {
			value, err := results[0].ToString()
			results = results[1:]
			to := chunk(r.item.Data, r.size, n)
			if err != nil || len(value) != len(to) {
				r.header = nil
				continue
			}
			copy(to, value)
		}
	}
	return nil
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
	names := make([]string, 0, len(keys))
	for i := range keys {
		if remote.Valid(&keys[i]) {
			name := s.name(&keys[i])
			names = append(names, name)
			commands = append(commands,
				[]string{"GETRANGE", name, "0", strconv.Itoa(headBytes - 1)}, []string{"UNLINK", name})
		}
	}
	results, err := s.do(ctx, commands)
	if err != nil {
		return err
	}
	for i, name := range names {
		head, err := results[2*i].ToString()
		if err != nil {
			continue
		}
		if err := s.unlinkRest(ctx, name, []byte(head)); err != nil {
			return err
		}
	}
	return nil
}

// unlinkAtOnce bounds a pipeline of unlinkRest, since the number of chunks comes from a value that
// may be foreign.
const unlinkAtOnce = 1024

// unlinkRest removes the chunks that a value refers to.
func (s *Store) unlinkRest(ctx context.Context, name string, head []byte) error {
	if len(head) != headBytes {
		return nil
	}
	length := int64(binary.LittleEndian.Uint32(head[8:]))
	nonce := binary.LittleEndian.Uint64(head[pool.ValueHeader:])
	size := int64(binary.LittleEndian.Uint32(head[pool.ValueHeader+nonceBytes:]))
	if size < MinChunkBytes || size > MaxChunkBytes {
		return nil
	}
	var commands [][]string
	last := chunks(int(length), int(size))
	for n := 1; n <= last; n++ {
		commands = append(commands, []string{"UNLINK", chunkName(name, nonce, n)})
		if n < last && len(commands) < unlinkAtOnce {
			continue
		}
		if _, err := s.do(ctx, commands); err != nil {
			return err
		}
		commands = commands[:0]
	}
	return nil
}

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
