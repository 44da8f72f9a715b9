package events

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"syscall"
	"time"

	"github.com/kvagent/kvagent/pool"
)

// newSuffix is appended to the file's name while it is made anew.
const newSuffix = ".new"

// makeAnew makes the file anew, and then lets it rest: what makes it necessary may occur all the
// time, and what makes it fail may last.
func (k *keeper) makeAnew() {
	began := time.Now()
	k.drain()
	k.behind.Store(false) // what is said from now on is queued, or the next time has it
	k.mu.Lock()
	forgotten := k.forgotten
	k.forgotten = map[pool.Fingerprint]bool{}
	k.mu.Unlock()
	err := k.rewrite(forgotten)
	rest := restTimes * time.Since(began)
	if err != nil {
		k.failed("rewriting", err)
		k.behind.Store(true)
		k.mu.Lock()
		maps.Copy(k.forgotten, forgotten)
		k.mu.Unlock()
		rest = max(rest, failedRest)
	}
	k.resting = time.After(rest)
}

// rewrite makes the file anew from the ledgers of spaces that are open, and from what it has of
// others that are not forgotten.
func (k *keeper) rewrite(forgotten map[pool.Fingerprint]bool) (err error) {
	k.limit = max(minRewrite, 2*k.bytes.Load())
	// A space that is not loaded keeps what the file has, which may lack what found no room.
	if err := k.loadNew(); err != nil {
		return err
	}
	flags := os.O_CREATE
	if len(k.loaded) == 0 {
		flags = 0 // there is nothing to begin a file with
	}
	if err := k.open(flags); err != nil {
		if flags == 0 && errors.Is(err, os.ErrNotExist) {
			return nil
		}
		return err
	}
	f, err := openOwn(k.path+newSuffix, os.O_CREATE|os.O_EXCL)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.Close(), os.Remove(f.Name()))
		}
	}()
	out := &counting{out: bufio.NewWriterSize(f, 1<<20)}
	if err := k.writeAll(out, forgotten); err != nil {
		return err
	}
	if err := errors.Join(out.out.Flush(), f.Sync()); err != nil {
		return err
	}
	if err := os.Rename(f.Name(), k.path); err != nil {
		return err
	}
	k.failed("closing", k.file.Close())
	k.adopt(f, out.bytes)
	k.failing = false
	return nil
}

// openOwn opens and locks a file that only the agent's user can reach: it has prompts.
func openOwn(path string, flags int) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|syscall.O_NOFOLLOW|flags, 0o600)
	if err != nil {
		return nil, err
	}
	if err := takeOwn(f, path); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

func takeOwn(f *os.File, path string) error {
	info, err := f.Stat()
	if err != nil {
		return err
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok || !info.Mode().IsRegular() || int(st.Uid) != os.Geteuid() || info.Mode().Perm()&0o077 != 0 {
		return fmt.Errorf("%s: %v of uid %d, allowed: a regular file of uid %d, mode 0600", path, info.Mode(), st.Uid,
			os.Geteuid())
	}
	err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	if errors.Is(err, syscall.EWOULDBLOCK) {
		return fmt.Errorf("%s: another process has it", path)
	}
	now, err := os.Lstat(path) // a file system may have no locks
	if err == nil && !os.SameFile(info, now) {
		err = fmt.Errorf("%s: it was replaced", path)
	}
	return err
}

func (k *keeper) writeAll(out *counting, forgotten map[pool.Fingerprint]bool) error {
	if err := out.write([]byte(tokenMagic)); err != nil {
		return err
	}
	live, open := map[pool.Fingerprint]bool{}, map[*space]bool{}
	for _, sp := range k.desk.all() {
		if k.loaded[sp] && sp.isOpen() {
			live[sp.print], open[sp] = true, true
		}
	}
	k.loaded = open // spaces that were closed are loaded again when they are opened again
	for sp := range open {
		if err := sp.writeTokens(out); err != nil {
			return err
		}
		if !sp.isOpen() { // what was written may lack blocks that outlive it
			delete(live, sp.print)
		}
	}
	carried := 0
	_, err := readRecords(io.NewSectionReader(k.file, 0, k.bytes.Load()),
		func(fp pool.Fingerprint, whole, _ []byte) error {
			if live[fp] || forgotten[fp] || carried > maxCarried {
				return nil
			}
			carried += len(whole)
			return out.write(whole)
		})
	return err
}

// writeTokens writes the tokens of a space's blocks.
func (sp *space) writeTokens(out *counting) (err error) {
	var one []byte
	for _, l := range sp.ledgers {
		for from := uint32(1); l != nil && from != 0; {
			sp.mu.Lock()
			list, next := l.said(from)
			sp.mu.Unlock()
			for _, m := range list {
				if one, err = appendRecord(one[:0], sp.print, m); err != nil {
					return fmt.Errorf("a record: %w", err)
				}
				if err := out.write(one); err != nil {
					return err
				}
			}
			from = next
		}
	}
	return nil
}

// counting counts what it writes.
type counting struct {
	out   *bufio.Writer
	bytes int64
}

func (c *counting) write(p []byte) error {
	n, err := c.out.Write(p)
	c.bytes += int64(n)
	return err
}
