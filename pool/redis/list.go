package redis

import (
	"context"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/redis/rueidis"

	"github.com/kvagent/kvagent/pool"
)

var (
	_ pool.Lister      = (*Store)(nil)
	_ pool.SpaceLister = (*Store)(nil)
)

// scanCount is how many keys a server examines for one answer.
const scanCount = 1000

// List implements pool.Lister: every key of the prefix on every master. A key may be listed twice
// if the server gets more keys meanwhile.
func (s *Store) List(ctx context.Context, found func(k pool.Key, bytes int64) bool) error {
	return s.list(ctx, &listing{match: literal(s.o.Prefix) + "*", found: found})
}

// ListSpaces implements pool.SpaceLister. The servers examine all their keys, and send the names of
// the space, or all names if there are several spaces.
func (s *Store) ListSpaces(
	ctx context.Context, spaces []pool.Fingerprint, looked func(n int) error, found func(k pool.Key, bytes int64),
) error {
	match := literal(s.o.Prefix)
	if len(spaces) == 1 {
		match += hex.EncodeToString(spaces[0][:])
	}
	return s.list(ctx, &listing{
		match: match + "*", looked: looked,
		wants: func(k *pool.Key) bool { return slices.Contains(spaces, k.Space) },
		found: func(k pool.Key, bytes int64) bool { found(k, bytes); return true },
	})
}

// listing is one iteration over the keys.
type listing struct {
	match  string
	wants  func(k *pool.Key) bool // nil: all
	looked func(n int) error      // as in pool.SpaceLister; nil: not called
	found  func(k pool.Key, bytes int64) bool
}

func (s *Store) list(ctx context.Context, w *listing) error {
	client, err := s.enter(ctx)
	if err != nil {
		return err
	}
	s.leave() // each pipeline takes its own place
	for _, node := range client.Nodes() {
		info, err := node.Do(ctx, node.B().Arbitrary("INFO").Build()).ToString()
		if err != nil {
			return fmt.Errorf("redis: list: %w", err)
		}
		if infoFields(info)["role"] != "master" {
			continue
		}
		if more, err := s.listNode(ctx, node, w); err != nil || !more {
			return err
		}
	}
	return ctx.Err()
}

// listNode lists the keys of one server. It returns false if no more are wanted.
func (s *Store) listNode(ctx context.Context, node rueidis.Client, w *listing) (more bool, err error) {
	for cursor := uint64(0); ; {
		page, err := node.Do(ctx, node.B().Scan().Cursor(cursor).Match(w.match).Count(scanCount).Build()).AsScanEntry()
		if err != nil {
			return false, fmt.Errorf("redis: list: %w", err)
		}
		if more, err := s.listNames(ctx, page.Elements, w); err != nil || !more {
			return false, err
		}
		if w.looked != nil {
			if err := w.looked(scanCount); err != nil {
				return false, err
			}
		}
		if cursor = page.Cursor; cursor == 0 {
			return true, nil
		}
	}
}

// listNames asks for the lengths of values. It skips chunks and foreign keys.
func (s *Store) listNames(ctx context.Context, names []string, w *listing) (more bool, err error) {
	var commands [][]string
	var keys []pool.Key
	for _, name := range names {
		k, err := pool.ParseKey(strings.TrimPrefix(name, s.o.Prefix))
		if err == nil && (w.wants == nil || w.wants(&k)) {
			keys = append(keys, k)
			commands = append(commands, []string{"GETRANGE", name, "0", strconv.Itoa(headBytes - 1)})
		}
	}
	results, err := s.do(ctx, commands)
	if err != nil {
		return false, err
	}
	for i := range keys {
		head, err := results[i].ToString()
		if err != nil || len(head) != headBytes {
			continue // it was deleted meanwhile
		}
		if !w.found(keys[i], int64(binary.LittleEndian.Uint32([]byte(head[8:12])))) {
			return false, nil
		}
	}
	return true, nil
}

// literal escapes the characters that have a meaning in a server's pattern.
func literal(prefix string) string {
	return strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`, `]`, `\]`).Replace(prefix)
}
