package redis

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"strconv"

	"github.com/redis/rueidis"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/remote"
)

// headBytes is the size of what precedes a value's data: the header, the nonce of its chunks, and
// the bytes of one chunk.
const (
	nonceBytes = 8
	headBytes  = pool.ValueHeader + nonceBytes + 4
)

func (s *Store) name(k *pool.Key) string { return remote.Name(s.o.Prefix, k) }

// chunkName returns the name of the n-th chunk after the first, from 1.
func chunkName(name string, nonce uint64, n int) string {
	return name + "#" + strconv.FormatUint(nonce, 16) + "#" + strconv.Itoa(n)
}

// chunks returns how many chunks of size bytes follow the first of a value of length bytes.
func chunks(length, size int) int { return max(0, (length+size-1)/size-1) }

// chunk returns the n-th chunk of the data.
func chunk(data []byte, size, n int) []byte { return data[n*size : min((n+1)*size, len(data))] }

// Put implements pool.Store. Busy is an item that the server had no room for, or refused.
func (s *Store) Put(ctx context.Context, items []pool.Item) error {
	for len(items) > 0 {
		n := s.fit(items)
		if err := s.putBatch(ctx, items[:n]); err != nil {
			return err
		}
		items = items[n:]
	}
	return ctx.Err()
}

// fit returns how many items make one pipeline.
func (s *Store) fit(items []pool.Item) int {
	room := s.o.BatchBytes
	for i := range items {
		if room -= int64(len(items[i].Data)); room < 0 {
			return max(i, 1)
		}
	}
	return len(items)
}

// writing is a put in progress.
type writing struct {
	item  *pool.Item
	name  string
	nonce uint64
	rest  int // chunks after the first
}

// putBatch writes the later chunks of all items, then the heads that make the items visible.
func (s *Store) putBatch(ctx context.Context, items []pool.Item) error {
	all := make([]writing, 0, len(items))
	for i := range items {
		it := &items[i]
		if !remote.Valid(&it.Key) || int64(len(it.Data)) > 1<<32-1 {
			it.Status = pool.Invalid
			continue
		}
		it.Status = pool.Busy
		w := writing{item: it, name: s.name(&it.Key), rest: chunks(len(it.Data), s.o.ChunkBytes)}
		if w.rest > 0 {
			w.nonce = newNonce()
		}
		all = append(all, w)
	}
	all, err := s.putRest(ctx, all)
	if err != nil {
		return err
	}
	return s.putHeads(ctx, all)
}

func newNonce() uint64 {
	var b [nonceBytes]byte
	_, _ = rand.Read(b[:]) // never fails
	return binary.LittleEndian.Uint64(b[:])
}

// putRest writes the chunks after the first, and returns the items whose chunks are all stored.
func (s *Store) putRest(ctx context.Context, all []writing) ([]writing, error) {
	var commands [][]string
	for i := range all {
		w := &all[i]
		for n := 1; n <= w.rest; n++ {
			data := chunk(w.item.Data, s.o.ChunkBytes, n)
			commands = append(commands, []string{
				"SET", chunkName(w.name, w.nonce, n), rueidis.BinaryString(data), "PX", millis(orphanTTL),
			})
		}
	}
	results, err := s.do(ctx, commands)
	if err != nil {
		return nil, err
	}
	whole := all[:0]
	for _, w := range all {
		ok := true
		for _, r := range results[:w.rest] {
			ok = s.stored(r.Error()) && ok
		}
		if results = results[w.rest:]; ok {
			whole = append(whole, w)
		}
	}
	return whole, nil
}

// stored reports whether a write succeeded, and counts failures by reason.
func (s *Store) stored(err error) bool {
	switch {
	case err == nil:
		return true
	case isFull(err):
		s.count[countFull].Add(1)
		s.condition.Set(remote.Full, err)
	default:
		s.count[countFailed].Add(1)
	}
	return false
}

// putHeads makes items visible unless they were stored meanwhile. It gives the chunks of stored
// items their final time to live, and deletes the others.
func (s *Store) putHeads(ctx context.Context, all []writing) error {
	var commands [][]string
	for i := range all {
		w := &all[i]
		args := []string{"SET", w.name, rueidis.BinaryString(s.head(w)), "NX"}
		if w.item.Key.Space != pool.EpochMarkers {
			args = append(args, "PX", millis(s.o.TTL))
		}
		commands = append(commands, args)
	}
	results, err := s.do(ctx, commands)
	if err != nil {
		return err
	}
	var after [][]string
	for i, r := range results {
		w := &all[i]
		switch err := r.Error(); {
		case rueidis.IsRedisNil(err):
			w.item.Status = pool.Exists
			if w.rest > 0 {
				s.count[countRaces].Add(1)
			}
		case s.stored(err):
			w.item.Status = pool.OK
			s.condition.Set(remote.OK, nil)
		}
		after = s.settle(after, w)
	}
	_, err = s.do(ctx, after)
	if ctx.Err() == nil {
		err = nil // the status of every item is known; chunks left over expire, and their items are then Missing
	}
	return err
}

// settle appends the commands that finish an item's chunks.
func (s *Store) settle(commands [][]string, w *writing) [][]string {
	for n := 1; n <= w.rest; n++ {
		name := chunkName(w.name, w.nonce, n)
		if w.item.Status == pool.OK {
			commands = append(commands, []string{"PEXPIRE", name, millis(s.o.TTL)})
		} else {
			commands = append(commands, []string{"UNLINK", name})
		}
	}
	return commands
}

// head returns the value that makes an item visible.
func (s *Store) head(w *writing) []byte {
	first := w.item.Data
	if w.rest > 0 {
		first = chunk(first, s.o.ChunkBytes, 0)
	}
	b := make([]byte, 0, headBytes+len(first))
	b = pool.AppendValueHeader(b, &w.item.Key, w.item.Data)
	b = binary.LittleEndian.AppendUint64(b, w.nonce)
	b = binary.LittleEndian.AppendUint32(b, uint32(s.o.ChunkBytes))
	return append(b, first...)
}
