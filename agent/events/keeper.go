package events

import (
	"bufio"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"go.uber.org/zap"

	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool"
)

// Limits of the files of tokens.
const (
	maxUnused = 512 << 20 // bytes of files of spaces that are not open; the oldest are removed
	maxFiles  = 1 << 10   // of such files
	saveEvery = 5 * time.Minute
)

// keeper keeps the tokens of held blocks in a file for each space, for the next process: its blocks
// may outlive this one. A file is read when its space opens, and written when it is closed, when
// the desk ends, and after a while in which something was said. A nil keeper keeps nothing.
//
// A file is a log of BLOCK_TOKENS as on the wire, each after its length and CRC-32C
// as u32 LE. A reader stops at the first one that is not whole. Nothing depends on their order.
type keeper struct {
	path   string // of the folder
	log    *zap.Logger
	errors atomic.Uint64
	mu     sync.Mutex // held while the folder is used, and taken before the desk's
}

const (
	recordHead = 8
	newSuffix  = ".new" // of a file's name while it is written
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// nameOf returns the name of a space's file.
func nameOf(fp pool.Fingerprint) string { return hex.EncodeToString(fp[:]) }

// use calls do with the folder, which it makes if create is set, and counts an error. Without the
// folder nothing is done.
func (k *keeper) use(create bool, do func(*os.Root) error) {
	if k == nil {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	folder, err := k.open(create)
	if err == nil {
		err = errors.Join(do(folder), folder.Close())
	}
	if err != nil && (create || !errors.Is(err, fs.ErrNotExist)) {
		k.errors.Add(1)
		k.log.Warn("the files of KV events' tokens", zap.String("folder", k.path), zap.Error(err))
	}
}

// open opens the folder. Only the agent's user may reach it: it has prompts. The pool beside it is
// locked, so no other process has it.
func (k *keeper) open(create bool) (*os.Root, error) {
	if create {
		if err := os.Mkdir(k.path, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return nil, err
		}
	}
	info, err := os.Lstat(k.path)
	if err != nil {
		return nil, err
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok || !info.IsDir() || int(st.Uid) != os.Geteuid() || info.Mode().Perm()&0o077 != 0 {
		return nil, fmt.Errorf("%v, allowed: a folder of uid %d, mode 0700", info.Mode(), os.Geteuid())
	}
	root, err := os.OpenRoot(k.path)
	if err != nil {
		return nil, err
	}
	if now, err := root.Stat("."); err != nil || !os.SameFile(info, now) {
		return nil, errors.Join(errors.New("it was replaced"), root.Close())
	}
	return root, nil
}

// load says to a space what its file has.
func (k *keeper) load(sp *space) {
	k.use(false, func(folder *os.Root) error {
		file, err := folder.Open(nameOf(sp.print))
		if err != nil {
			return err
		}
		defer file.Close()
		return readRecords(file, func(m *ipc.BlockTokens) {
			sp.desk.mu.Lock()
			defer sp.desk.mu.Unlock()
			sp.learn(m)
		})
	})
	sp.desk.mu.Lock()
	defer sp.desk.mu.Unlock()
	sp.loaded = true
}

// save writes the file of a space, after it was read.
func (k *keeper) save(sp *space) {
	sp.desk.mu.Lock()
	loaded := sp.loaded
	sp.desk.mu.Unlock()
	if !loaded {
		k.load(sp)
	}
	k.use(true, func(folder *os.Root) error {
		name := nameOf(sp.print)
		file, err := folder.OpenFile(name+newSuffix, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
		if err != nil {
			return err
		}
		if err = errors.Join(sp.write(file), file.Close()); err != nil {
			return err
		}
		return errors.Join(folder.Rename(name+newSuffix, name), sp.desk.removeUnused(folder))
	})
}

// forget removes the file of a space.
func (k *keeper) forget(fp pool.Fingerprint) {
	k.use(false, func(folder *os.Root) error { return folder.Remove(nameOf(fp)) })
}

// write writes records of the held blocks whose tokens are known, a part at a time, so that others
// wait for the lock only as long.
func (sp *space) write(to io.Writer) error {
	for _, l := range sp.ledgers {
		for from := uint32(1); from < l.high; from += compareStride {
			sp.desk.mu.Lock()
			out, err := l.records(from, min(from+compareStride, l.high))
			sp.desk.mu.Unlock()
			if err == nil {
				_, err = to.Write(out)
			}
			if err != nil {
				return err
			}
		}
	}
	return nil
}

func (l *ledger) records(from, to uint32) (out []byte, err error) {
	var list []event
	for n := from; n < to; n++ {
		if b := l.at(n); b.is(flagKnown) && b.held != 0 {
			list = append(list, event{l, n, 0, true})
		}
	}
	for _, r := range runs(list) {
		m := r.message()
		if out, err = appendRecord(out, &ipc.BlockTokens{
			Group: m.Group, Parent: m.Parent, HashLen: m.HashLen, Hashes: m.Hashes, Tokens: m.Tokens, Extra: m.Extra,
		}); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// appendRecord appends a record to dst.
func appendRecord(dst []byte, m *ipc.BlockTokens) ([]byte, error) {
	at := len(dst)
	out, err := ipc.Encode(append(dst, make([]byte, recordHead)...), m)
	if err != nil {
		return nil, err
	}
	body := out[at+recordHead:]
	binary.LittleEndian.PutUint32(out[at:], uint32(len(body)))
	binary.LittleEndian.PutUint32(out[at+4:], crc32.Checksum(body, castagnoli))
	return out, nil
}

// readRecords calls found with each record, which is valid during the call.
func readRecords(from io.Reader, found func(*ipc.BlockTokens)) error {
	in := bufio.NewReaderSize(from, 1<<20)
	var head [recordHead]byte
	var body []byte
	for {
		_, err := io.ReadFull(in, head[:])
		n := binary.LittleEndian.Uint32(head[:])
		if err == nil && n <= ipc.MaxFrame {
			body = slices.Grow(body[:0], int(n))[:n]
			_, err = io.ReadFull(in, body)
		}
		switch {
		case errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF):
			return nil
		case err != nil:
			return err
		case n > ipc.MaxFrame || crc32.Checksum(body, castagnoli) != binary.LittleEndian.Uint32(head[4:]):
			return nil
		}
		if m, err := ipc.Decode(body); err == nil {
			if said, ok := m.(*ipc.BlockTokens); ok {
				found(said)
			}
		}
	}
}

// removeUnused removes the oldest files of spaces that are not open while there are too many.
func (d *Desk) removeUnused(folder *os.Root) error {
	used := map[string]bool{}
	d.mu.Lock()
	for _, sp := range d.spaces {
		used[nameOf(sp.print)] = true
	}
	d.mu.Unlock()
	list, err := fs.ReadDir(folder.FS(), ".")
	if err != nil {
		return err
	}
	var files []fs.FileInfo
	for _, one := range list {
		if info, err := one.Info(); err == nil && !used[one.Name()] {
			files = append(files, info)
		}
	}
	slices.SortFunc(files, func(a, b fs.FileInfo) int { return b.ModTime().Compare(a.ModTime()) })
	bytes := int64(0)
	for i, one := range files {
		if bytes += one.Size(); i >= maxFiles || bytes > maxUnused {
			err = errors.Join(err, folder.Remove(one.Name()))
		}
	}
	return err
}
