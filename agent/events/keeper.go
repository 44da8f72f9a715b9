package events

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"sync/atomic"

	"go.uber.org/zap"

	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool"
)

// Limits of a file of tokens.
const (
	maxQueued  = 64        // messages that wait to be written; more, and the file is made anew from the ledgers
	minRewrite = 64 << 20  // bytes: a smaller file is not made anew to save room
	maxCarried = 512 << 20 // bytes of spaces that are not open, which a new file takes over; the rest is lost
)

// keeper keeps the tokens that engines say in a file, for the next process: its blocks may outlive
// this one. A nil keeper keeps nothing.
type keeper struct {
	desk   *Desk
	path   string
	log    *zap.Logger
	queue  chan []byte   // records
	opened chan struct{} // cap 1: spaces may have been opened
	behind atomic.Bool   // a record was not queued
	bytes  atomic.Int64  // of the file
	errors atomic.Uint64

	// The following is the goroutine's.
	file   *os.File // nil: not opened yet, or it cannot be
	limit  int64    // bytes: a larger file is made anew
	loaded map[*space]bool
}

func newKeeper(d *Desk, path string, log *zap.Logger) *keeper {
	if path == "" {
		return nil
	}
	return &keeper{
		desk: d, path: path, log: log, queue: make(chan []byte, maxQueued), opened: make(chan struct{}, 1),
		limit: minRewrite, loaded: map[*space]bool{},
	}
}

// keep keeps what was said of a space's blocks. It does not wait.
func (k *keeper) keep(fp pool.Fingerprint, m *ipc.BlockTokens) {
	if k == nil {
		return
	}
	one, err := appendRecord(nil, fp, m)
	if err == nil {
		select {
		case k.queue <- one:
			return
		default:
		}
	}
	k.behind.Store(true)
}

// load has the tokens loaded of spaces that are open and were not.
func (k *keeper) load() {
	if k != nil {
		select {
		case k.opened <- struct{}{}:
		default:
		}
	}
}

// renew has the file made anew, without what is not held any more.
func (k *keeper) renew() {
	if k != nil {
		k.behind.Store(true)
		k.load()
	}
}

// work serves the file until the desk ends.
func (k *keeper) work() {
	for {
		ends := false
		select {
		case <-k.desk.stop:
			ends = true
		case <-k.opened:
			k.loadNew()
		case one := <-k.queue:
			k.append(one)
		}
		for ends && len(k.queue) > 0 {
			k.append(<-k.queue)
		}
		if k.behind.Load() || k.bytes.Load() > k.limit {
			k.failed("rewriting", k.rewrite())
		}
		if ends {
			if k.file != nil {
				k.failed("closing", k.file.Close())
			}
			return
		}
	}
}

// failed counts and logs an error.
func (k *keeper) failed(what string, err error) {
	if err != nil {
		k.errors.Add(1)
		k.log.Warn("the file of KV events' tokens", zap.String("failed", what), zap.String("path", k.path),
			zap.Error(err))
	}
}

// open opens the file and drops what is not whole at its end.
func (k *keeper) open(flags int) (err error) {
	if k.file != nil {
		return nil
	}
	f, err := os.OpenFile(k.path, os.O_RDWR|flags, 0o600)
	if err != nil {
		return err
	}
	end, err := readRecords(f, func(pool.Fingerprint, []byte, []byte) error { return nil })
	if errors.Is(err, errNoTokens) {
		if err = f.Truncate(0); err == nil {
			_, err = f.WriteAt([]byte(tokenMagic), 0)
		}
		end = int64(len(tokenMagic))
	} else if err == nil {
		err = f.Truncate(end)
	}
	if err != nil {
		return errors.Join(err, f.Close())
	}
	k.adopt(f, end)
	return nil
}

func (k *keeper) adopt(f *os.File, size int64) {
	k.file, k.limit = f, max(minRewrite, 2*size)
	k.bytes.Store(size)
}

// loadNew says to spaces that were opened what the file has of them.
func (k *keeper) loadNew() {
	fresh, loaded := map[pool.Fingerprint]*space{}, map[*space]bool{}
	for _, sp := range k.desk.all() {
		if loaded[sp] = true; !k.loaded[sp] {
			fresh[sp.print] = sp
		}
	}
	k.loaded = loaded
	if err := k.open(0); err != nil || len(fresh) == 0 {
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			k.failed("opening", err)
		}
		return
	}
	_, err := readRecords(io.NewSectionReader(k.file, 0, k.bytes.Load()),
		func(fp pool.Fingerprint, _, frame []byte) error {
			if sp := fresh[fp]; sp != nil {
				if m, err := ipc.Decode(recordVersion, frame); err == nil {
					if said, ok := m.(*ipc.BlockTokens); ok {
						sp.learn(said)
					}
				}
			}
			return nil
		})
	k.failed("reading", err)
}

// append writes a record.
func (k *keeper) append(one []byte) {
	err := k.open(os.O_CREATE)
	if err == nil {
		if _, err = k.file.WriteAt(one, k.bytes.Load()); err == nil {
			k.bytes.Add(int64(len(one)))
			return
		}
	}
	k.failed("writing", err)
}

// rewrite makes the file anew from the ledgers of spaces that are open, and from what it has of
// others.
func (k *keeper) rewrite() (err error) {
	k.behind.Store(false) // what is said from now on is queued, or the next rewrite has it
	k.limit = max(minRewrite, 2*k.bytes.Load())
	k.loadNew() // a space that is not loaded keeps what the file has, which may lack what found no room
	if err := k.open(os.O_CREATE); err != nil {
		return err
	}
	f, err := os.OpenFile(k.path+".new", os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.Close(), os.Remove(f.Name()))
		}
	}()
	out := &counting{out: bufio.NewWriterSize(f, 1<<20)}
	if err := k.writeAll(out); err != nil {
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
	return nil
}

func (k *keeper) writeAll(out *counting) error {
	if err := out.write([]byte(tokenMagic)); err != nil {
		return err
	}
	live := map[pool.Fingerprint]bool{}
	open := map[*space]bool{}
	for _, sp := range k.desk.all() {
		if k.loaded[sp] {
			live[sp.print], open[sp] = true, true
		}
	}
	k.loaded = open // spaces that were closed are loaded again when they are opened again
	_, err := readRecords(io.NewSectionReader(k.file, 0, k.bytes.Load()),
		func(fp pool.Fingerprint, whole, _ []byte) error {
			if live[fp] || out.bytes > maxCarried {
				return nil
			}
			return out.write(whole)
		})
	if err != nil {
		return err
	}
	for sp := range open {
		if err := sp.writeTokens(out); err != nil {
			return err
		}
	}
	return nil
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
