package main

import (
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/pool/dram"
	"github.com/kvagent/kvagent/pool/mooncake"
)

// rdmaSettings are how blocks of other agents are read by one-sided reads, as --peer-rdma has them:
// PROTOCOL, or PROTOCOL?devices=NAME,NAME&host=NAME&python=PATH.
type rdmaSettings struct {
	text                            string
	protocol, devices, host, python string
}

func (r *rdmaSettings) Type() string   { return "protocol" }
func (r *rdmaSettings) String() string { return r.text }

func (r *rdmaSettings) Set(text string) error {
	protocol, query, _ := strings.Cut(text, "?")
	options, err := url.ParseQuery(query)
	if err != nil {
		return fmt.Errorf("%q: %w", text, err)
	}
	set := rdmaSettings{text: text, protocol: protocol}
	fields := map[string]*string{"devices": &set.devices, "host": &set.host, "python": &set.python}
	for name, values := range options {
		field := fields[name]
		if field == nil || len(values) != 1 || values[0] == "" {
			return fmt.Errorf("%q: option %s, allowed: devices, host, python, each once and not empty", text, name)
		}
		*field = values[0]
	}
	switch {
	case protocol != "tcp" && protocol != "rdma":
		return fmt.Errorf("%q: protocol %q, allowed: rdma, tcp", text, protocol)
	case protocol == "tcp" && set.devices != "":
		return fmt.Errorf("%q: devices are given with tcp, allowed: with rdma", text)
	case slices.Contains(strings.Split(set.devices, ","), "") && set.devices != "":
		return fmt.Errorf("%q: devices %q, allowed: names, separated by commas", text, set.devices)
	}
	*r = set
	return nil
}

// pinWithin bounds the start of the helper: RDMA pins all of the pool, some GB in a second.
const pinWithin = 5 * time.Minute

// openReads starts the helper that reads the memory of other agents. A library or device that the
// machine lacks is no error: blocks are sent in frames then.
func openReads(s *peerSettings, address string, p *dram.Pool, log *zap.Logger) (*mooncake.Reads, error) {
	r := &s.rdma
	host := r.host
	if host == "" {
		var err error
		if host, err = s.rdmaHost(address); err != nil {
			return nil, err
		}
	}
	base, fd := p.Arena()
	reads, err := mooncake.OpenReads(mooncake.ReadsOptions{
		Protocol: r.protocol, Devices: r.devices, Host: host, Python: r.python,
		Arena: mooncake.Memory{Base: base, FD: fd}, Within: 2 * s.timeout, SetupWithin: pinWithin,
		OnState: func(reason error) {
			if reason != nil {
				log.Warn("peer-rdma is not there: blocks of other agents come in frames",
					zap.String("protocol", r.protocol), zap.Error(reason))
				return
			}
			log.Info("peer-rdma is there", zap.String("protocol", r.protocol), zap.String("host", host))
		},
	})
	if err != nil {
		return nil, fmt.Errorf("peer-rdma: %w", err)
	}
	return reads, nil
}

// rdmaHost returns the name by which other nodes reach this one: that of the peer address, else the
// host's.
func (p *peerSettings) rdmaHost(address string) (string, error) {
	if host, _, err := net.SplitHostPort(address); err == nil && host != "" {
		return host, nil
	}
	return os.Hostname()
}

// checkRDMA validates the combination of --peer-rdma with other settings.
func (p *peerSettings) checkRDMA() error {
	switch {
	case p.rdma.protocol == "":
	case p.tlsDir != "":
		return errors.New("peer-rdma: given with peer-tls-dir, allowed: with peer-key-file (what is read is not " +
			"encrypted)")
	case p.keyFile == "":
		return errors.New("peer-rdma: given without peer-key-file, allowed: with it")
	}
	return nil
}

// reportReads returns the state of one-sided reads.
func reportReads(s *peerSettings, reads *mooncake.Reads) admin.Reads {
	out := admin.Reads{Protocol: s.rdma.protocol}
	if reads != nil {
		_, out.Reason = reads.Exposed()
	}
	return out
}
