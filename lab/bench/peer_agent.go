package bench

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram"
	"github.com/kvagent/kvagent/pool/peer"
	"github.com/kvagent/kvagent/settings"
)

// Files in the measurement's directory.
const (
	peerAddresses = "addresses" // of the server with a key, of that with TLS, and of the plain one
	peerCert      = "cert.pem"
	peerCertKey   = "key.pem"
)

// peerAgent is the pool that blocks are fetched from, in a process of its own.
type peerAgent struct {
	pool    *dram.Pool
	arena   []byte
	spaces  map[pool.Fingerprint]pool.SpaceID
	plain   map[int][]pool.Slot // by size of a block: pinned, in order
	servers []*peer.Server
	listen  net.Listener // for plain copies
}

// peerAgentCommand is the process that only bench peer starts.
func peerAgentCommand() *cobra.Command {
	return &cobra.Command{
		Use: "agent DIR BYTES", Hidden: true, Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			size, err := strconv.ParseInt(args[1], 10, 64)
			if err != nil {
				return settings.Invalid(err)
			}
			a := &peerAgent{spaces: map[pool.Fingerprint]pool.SpaceID{}, plain: map[int][]pool.Slot{}}
			defer func() { err = errors.Join(err, a.close()) }()
			if err := a.open(args[0], size); err != nil {
				return err
			}
			return serveParent(cmd.InOrStdin(), cmd.OutOrStdout(), func(string) error { return nil })
		},
	}
}

// peerSpec is the space of blocks of one size.
func peerSpec(block int) pool.Spec {
	return pool.Spec{
		Fingerprint: pool.Fingerprint{0: 1, 1: byte(block >> 16)}, Identity: []byte(strconv.Itoa(block)), Shards: 1,
		Groups: []pool.Group{{BlockTokens: 16, ShardBytes: []uint32{uint32(block)}}},
	}
}

// peerHashes are those of the blocks of one measurement.
func peerHashes(blocks int) pool.Hashes {
	blob := make([]byte, blocks*pool.MaxHashLen)
	for i := range blocks {
		binary.LittleEndian.PutUint64(blob[i*pool.MaxHashLen:], uint64(i)+1)
	}
	return pool.Chain(blob, pool.MaxHashLen)
}

// openPeerPool opens a pool for blocks of all sizes.
func openPeerPool(size int64) (*dram.Pool, error) {
	p, err := dram.Open(dram.Options{Bytes: size * int64(len(peerBlocks)+1), SlabBytes: 4 << 20, HugePages: dram.Off})
	if err != nil {
		return nil, err
	}
	return p, p.Populated()
}

func (a *peerAgent) open(dir string, size int64) (err error) {
	if a.pool, err = openPeerPool(size); err != nil {
		return err
	}
	a.arena, _ = a.pool.Arena()
	for _, block := range peerBlocks {
		if err := a.fill(block, int(size)/block); err != nil {
			return err
		}
	}
	key, keyErr := peer.Key(make([]byte, peer.MinKey))
	cert := filepath.Join(dir, peerCert)
	certs, certErr := peer.LoadTLS(cert, filepath.Join(dir, peerCertKey), cert)
	if err := errors.Join(keyErr, certErr); err != nil {
		return err
	}
	addresses := ""
	for _, auth := range []peer.Auth{key, certs} {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return err
		}
		s, err := peer.Serve(l, a.config(auth))
		if err != nil {
			return err
		}
		a.servers = append(a.servers, s)
		addresses += s.Addr().String() + "\n"
	}
	if a.listen, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
		return err
	}
	go a.servePlain()
	addresses += a.listen.Addr().String() + "\n"
	return os.WriteFile(filepath.Join(dir, peerAddresses), []byte(addresses), 0o600)
}

func (a *peerAgent) config(auth peer.Auth) peer.Config {
	return peer.Config{
		Index: a.pool, Slots: a.pool, Arena: a.arena, Auth: auth,
		Resolve: func(f pool.Fingerprint) (pool.SpaceID, uint32, bool) {
			s, ok := a.spaces[f]
			return s, 1, ok
		},
		Transfers: func(pool.SpaceID, string) (peer.Transfer, <-chan struct{}) {
			return peer.Transfer{State: peer.Complete}, nil
		},
	}
}

// fill stores the blocks of one size, and pins them for the plain copies.
func (a *peerAgent) fill(block, blocks int) error {
	spec := peerSpec(block)
	space, err := a.pool.OpenSpace(spec)
	if err != nil {
		return err
	}
	a.spaces[spec.Fingerprint] = space
	b := pool.Batch{
		Space: space, Epoch: 1, Hashes: peerHashes(blocks), Status: make([]pool.Status, blocks),
		Slots: make([]pool.Slot, blocks),
	}
	a.pool.Reserve(&b)
	for i := range b.Slots {
		if b.Status[i] != pool.OK {
			return fmt.Errorf("block %d of %d bytes has status %d", i, block, b.Status[i])
		}
		s := &b.Slots[i]
		mem := a.arena[s.Off : s.Off+int64(s.Len)]
		for at := 0; at < len(mem); at += 8 {
			binary.LittleEndian.PutUint64(mem[at:], uint64(i)*0x9E3779B97F4A7C15+uint64(at))
		}
		key := pool.Key{Space: spec.Fingerprint, Hash: pool.MakeHash(b.Hashes.At(i))}
		s.Sum = pool.Sum(key.Seed(s.Len), mem)
	}
	a.pool.Commit(b.Slots, 1, b.Status)
	a.pool.Acquire(&b)
	a.plain[block] = b.Slots
	return nil
}

// servePlain writes to each connection what it asks for: the size of a block, and which of the
// blocks, each a u32.
func (a *peerAgent) servePlain() {
	for {
		c, err := a.listen.Accept()
		if err != nil {
			return
		}
		go func() {
			defer c.Close()
			var ask [12]byte
			for {
				if _, err := io.ReadFull(c, ask[:]); err != nil {
					return
				}
				slots := a.plain[int(binary.LittleEndian.Uint32(ask[:]))]
				first, count := binary.LittleEndian.Uint32(ask[4:]), binary.LittleEndian.Uint32(ask[8:])
				for _, s := range slots[first : first+count] {
					if _, err := c.Write(a.arena[s.Off : s.Off+int64(s.Len)]); err != nil {
						return
					}
				}
			}
		}()
	}
}

func (a *peerAgent) close() error {
	var errs []error
	for _, s := range a.servers {
		errs = append(errs, s.Close())
	}
	if a.listen != nil {
		errs = append(errs, a.listen.Close())
	}
	if a.pool != nil {
		errs = append(errs, a.pool.Close())
	}
	return errors.Join(errs...)
}

// addresses reads the child's file.
func readPeerAddresses(dir string) ([]string, error) {
	text, err := os.ReadFile(filepath.Join(dir, peerAddresses))
	if err != nil {
		return nil, err
	}
	var out []string
	for line := range bytes.Lines(text) {
		out = append(out, string(bytes.TrimSpace(line)))
	}
	return out, nil
}
