package bench

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/binary"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram"
	"github.com/kvagent/kvagent/pool/peer"
)

// peerBench is the pool that blocks are fetched into, and the ways to them.
type peerBench struct {
	settings *peerSettings
	dir      string
	agent    *childProcess
	addr     []string // key, TLS, plain
	pool     *dram.Pool
	arena    []byte
	key, tls *peer.Client
	plain    []net.Conn
}

func measurePeer(s *peerSettings) (report *peerReport, err error) {
	b := &peerBench{settings: s}
	defer func() { err = errors.Join(err, b.close()) }()
	if err := b.open(); err != nil {
		return nil, err
	}
	report = &peerReport{Bytes: s.bytes, Rounds: s.rounds, Streams: s.streams}
	for _, block := range peerBlocks {
		row, err := b.measure(block)
		if err != nil {
			return nil, fmt.Errorf("blocks of %d bytes: %w", block, err)
		}
		if report.Rows = append(report.Rows, row); len(report.Rows) == 1 || row.KeyRatio < report.Ratio {
			report.Ratio = row.KeyRatio
		}
	}
	return report, nil
}

func (b *peerBench) open() (err error) {
	if b.dir, err = os.MkdirTemp("", "kvbench-peer-"); err != nil {
		return err
	}
	if err := makeCertificate(b.dir); err != nil {
		return err
	}
	b.agent, err = startChildProcess("bench", "peer", "agent", b.dir, strconv.FormatInt(b.settings.bytes, 10))
	if err != nil {
		return err
	}
	if b.addr, err = readPeerAddresses(b.dir); err != nil {
		return err
	}
	if b.pool, err = openPeerPool(b.settings.bytes); err != nil {
		return err
	}
	b.arena, _ = b.pool.Arena()
	for range b.settings.streams {
		c, err := net.Dial("tcp", b.addr[2])
		if err != nil {
			return err
		}
		b.plain = append(b.plain, c)
	}
	key, keyErr := peer.Key(make([]byte, peer.MinKey))
	cert := filepath.Join(b.dir, peerCert)
	certs, certErr := peer.LoadTLS(cert, filepath.Join(b.dir, peerCertKey), cert)
	if err := errors.Join(keyErr, certErr); err != nil {
		return err
	}
	if b.key, err = b.client(key); err != nil {
		return err
	}
	b.tls, err = b.client(certs)
	return err
}

func (b *peerBench) client(auth peer.Auth) (*peer.Client, error) {
	return peer.NewClient(peer.ClientConfig{
		Slots: b.pool, Arena: b.arena, Auth: auth, Streams: b.settings.streams, BatchBytes: b.settings.batchBytes,
	})
}

func (b *peerBench) close() error {
	var errs []error
	for _, c := range b.plain {
		errs = append(errs, c.Close())
	}
	for _, c := range []*peer.Client{b.key, b.tls} {
		if c != nil {
			errs = append(errs, c.Close())
		}
	}
	if b.pool != nil {
		errs = append(errs, b.pool.Close())
	}
	if b.agent != nil {
		errs = append(errs, b.agent.close())
	}
	return errors.Join(append(errs, os.RemoveAll(b.dir))...)
}

// measure moves blocks of one size in turns; the first round is not counted.
func (b *peerBench) measure(block int) (row peerRow, err error) {
	row.BlockBytes = block
	spec := peerSpec(block)
	space, err := b.pool.OpenSpace(spec)
	if err != nil {
		return row, err
	}
	blocks := int(b.settings.bytes) / block
	ways := []func() error{
		func() error { return b.copyPlain(block, blocks) },
		func() error { return b.fetch(b.key, b.addr[0], space, &spec, blocks) },
		func() error { return b.fetch(b.tls, b.addr[1], space, &spec, blocks) },
	}
	if b.settings.noTLS {
		ways = ways[:2]
	}
	speed, cpu := make([][]float64, len(ways)), make([][]float64, len(ways))
	for round := range b.settings.rounds + 1 {
		for i, move := range ways {
			s, c, err := b.timed(move, float64(blocks*block)/1e9)
			if err != nil {
				return row, err
			}
			if round > 0 {
				speed[i], cpu[i] = append(speed[i], s), append(cpu[i], c)
			}
			if _, err := b.pool.ResetSpace(space); err != nil {
				return row, err
			}
			b.pool.Sweep()
		}
	}
	row.PlainGBps, row.PlainCPUsGB = rounded(middle(speed[0])), rounded(middle(cpu[0]))
	row.KeyGBps, row.KeyCPUsGB = rounded(middle(speed[1])), rounded(middle(cpu[1]))
	_, ratio, _ := quartiles(speed[1], speed[0])
	row.KeyRatio = rounded(ratio)
	if len(ways) > 2 {
		row.TLSGBps, row.TLSCPUsGB = rounded(middle(speed[2])), rounded(middle(cpu[2]))
		_, ratio, _ = quartiles(speed[2], speed[0])
		row.TLSRatio = rounded(ratio)
	}
	return row, nil
}

// timed returns GB per second, and processor seconds of both processes per GB.
func (b *peerBench) timed(move func() error, gigabytes float64) (speed, cpu float64, err error) {
	before, err := b.processorTime()
	if err != nil {
		return 0, 0, err
	}
	start := time.Now()
	if err := move(); err != nil {
		return 0, 0, err
	}
	took := time.Since(start).Seconds()
	after, err := b.processorTime()
	return gigabytes / took, (after - before) / gigabytes, err
}

// processorTime returns the seconds that both processes have used.
func (b *peerBench) processorTime() (seconds float64, err error) {
	var self unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &self); err != nil {
		return 0, err
	}
	seconds = float64(self.Utime.Nano()+self.Stime.Nano()) / 1e9
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", b.agent.cmd.Process.Pid))
	if err != nil {
		return 0, err
	}
	for _, task := range tasks {
		text, err := os.ReadFile(task)
		if err != nil {
			return 0, err
		}
		on, _, _ := strings.Cut(string(text), " ")
		ns, err := strconv.ParseInt(on, 10, 64)
		if err != nil {
			return 0, fmt.Errorf("%s: %w", task, err)
		}
		seconds += float64(ns) / 1e9
	}
	return seconds, nil
}

// fetch fetches all blocks of a space.
func (b *peerBench) fetch(c *peer.Client, addr string, space pool.SpaceID, spec *pool.Spec, blocks int) error {
	r, err := c.Fetch(context.Background(), addr, peer.Request{
		Space: spec.Fingerprint, ID: space, Epoch: b.pool.Epoch(space), Shards: 1,
		Groups: []peer.Group{{Hashes: peerHashes(blocks)}},
	}, nil)
	if err == nil && r.Blocks != blocks {
		err = fmt.Errorf("%d of %d blocks were fetched: %+v", r.Blocks, blocks, r)
	}
	return err
}

// copyPlain copies the same blocks into the arena, a share of them over each connection.
func (b *peerBench) copyPlain(block, blocks int) error {
	errs := make([]error, len(b.plain))
	var all sync.WaitGroup
	for i, c := range b.plain {
		first, end := blocks*i/len(b.plain), blocks*(i+1)/len(b.plain)
		all.Go(func() {
			var ask []byte
			for _, v := range []int{block, first, end - first} {
				ask = binary.LittleEndian.AppendUint32(ask, uint32(v))
			}
			_, errs[i] = c.Write(ask)
			for k := first; k < end && errs[i] == nil; k++ {
				_, errs[i] = io.ReadFull(c, b.arena[k*block:(k+1)*block])
			}
		})
	}
	all.Wait()
	return errors.Join(errs...)
}

// makeCertificate writes a certificate for 127.0.0.1 that is its own authority.
func makeCertificate(dir string) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	template := x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "kvbench"},
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage:  x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
	}
	der, err := x509.CreateCertificate(rand.Reader, &template, &template, &key.PublicKey, key)
	if err != nil {
		return err
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return err
	}
	cert := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	secret := pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private})
	return errors.Join(os.WriteFile(filepath.Join(dir, peerCert), cert, 0o600),
		os.WriteFile(filepath.Join(dir, peerCertKey), secret, 0o600))
}
