package redis

import (
	"context"
	"encoding/binary"
	"fmt"
	"strconv"
	"strings"

	"github.com/redis/rueidis"

	"github.com/kvagent/kvagent/pool"
)

var _ pool.Lister = (*Store)(nil)

// scanCount is how many keys a server examines for one answer.
const scanCount = 1000

// List implements pool.Lister: every key of the prefix on every master. A key may be listed twice
// if the server gets more keys meanwhile.
func (s *Store) List(ctx context.Context, found func(k pool.Key, bytes int64) bool) error {
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
		if more, err := s.listNode(ctx, node, found); err != nil || !more {
			return err
		}
	}
	return ctx.Err()
}

// listNode lists the keys of one server. It returns false if no more are wanted.
func (s *Store) listNode(
	ctx context.Context, node rueidis.Client, found func(k pool.Key, bytes int64) bool,
) (more bool, err error) {
	match := literal(s.o.Prefix) + "*"
	for cursor := uint64(0); ; {
		page, err := node.Do(ctx, node.B().Scan().Cursor(cursor).Match(match).Count(scanCount).Build()).AsScanEntry()
		if err != nil {
			return false, fmt.Errorf("redis: list: %w", err)
		}
		if more, err := s.listNames(ctx, page.Elements, found); err != nil || !more {
			return false, err
		}
		if cursor = page.Cursor; cursor == 0 {
			return true, nil
		}
	}
}

// listNames asks for the lengths of values. It skips chunks and foreign keys.
func (s *Store) listNames(
	ctx context.Context, names []string, found func(k pool.Key, bytes int64) bool,
) (more bool, err error) {
	var commands [][]string
	var keys []pool.Key
	for _, name := range names {
		k, err := pool.ParseKey(strings.TrimPrefix(name, s.o.Prefix))
		if err == nil {
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
		if !found(keys[i], int64(binary.LittleEndian.Uint32([]byte(head[8:12])))) {
			return false, nil
		}
	}
	return true, nil
}

// literal escapes the characters that have a meaning in a server's pattern.
func literal(prefix string) string {
	return strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`, `]`, `\]`).Replace(prefix)
}
