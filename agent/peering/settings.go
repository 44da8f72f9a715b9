package peering

import (
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"go.uber.org/zap"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/agent/guests"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram"
	"github.com/kvagent/kvagent/pool/mooncake"
	"github.com/kvagent/kvagent/pool/peer"
	"github.com/kvagent/kvagent/pool/peer/allow"
	"github.com/kvagent/kvagent/settings"
)

// Settings are the settings of transfers, and of the agents of other nodes.
type Settings struct {
	listen, advertise string // host:port
	keyFile           string
	tlsDir            string
	allow             allow.Hosts
	rdma              rdmaSettings
	timeout           time.Duration
}

// Files in the directory of --peer-tls-dir, named as in Kubernetes' secrets of type tls.
const (
	tlsCert = "tls.crt"
	tlsKey  = "tls.key"
	tlsCA   = "ca.crt"
)

// AddFlags defines the settings.
func (p *Settings) AddFlags(f *pflag.FlagSet) {
	p.timeout = peer.DefaultTimeout
	f.StringVar(&p.listen, "peer-listen", "",
		"address:port where agents of other nodes fetch blocks; needs --peer-key-file or --peer-tls-dir; "+
			"empty: none do (docs/PD.md)")
	f.StringVar(&p.advertise, "peer-advertise", "",
		"host:port that engines tell others to reach this agent; default: --peer-listen, with the host's name for a "+
			"wildcard")
	f.StringVar(&p.keyFile, "peer-key-file", "",
		"file with a key that all agents share, 32 to 4096 bytes, readable by its owner alone, or also by a group of "+
			"the agent's process; it does not encrypt")
	f.StringVar(&p.tlsDir, "peer-tls-dir", "",
		"directory with this agent's certificate (tls.crt) and its private key (tls.key), and the authorities that "+
			"sign the other agents' (ca.crt), in PEM; instead of a key, and encrypts")
	f.Var((*allowValue)(&p.allow), "peer-allow",
		"hosts from which requests may have blocks fetched: names, addresses and networks, separated by commas; "+
			"default: any that has the key or a certificate")
	f.Var(&p.rdma, "peer-rdma",
		"read blocks of other agents by Mooncake's transfer engine: rdma or tcp, with options such as "+
			"rdma?devices=mlx5_0&python=/opt/venv/bin/python; empty: they are sent over the connection (docs/PD.md)")
	f.Var(settings.Duration(&p.timeout, peer.MinTimeout, peer.MaxTimeout), "peer-timeout",
		"silence after which an agent of another node counts as dead")
}

// Check validates the combination of settings. The files are read later.
func (p *Settings) Check() error {
	var bad []error
	if p.tlsDir != "" && p.keyFile != "" {
		bad = append(bad, errors.New("peer-key-file: given with peer-tls-dir, allowed: a key or certificates"))
	}
	const noProof = "given without peer-key-file and peer-tls-dir, allowed: with one"
	known := p.tlsDir != "" || p.keyFile != ""
	if p.listen != "" && !known {
		bad = append(bad, errors.New("peer-listen: "+noProof))
	}
	if !p.allow.Any() && !known {
		bad = append(bad, errors.New("peer-allow: "+noProof))
	}
	for _, a := range []struct{ name, value string }{{"peer-listen", p.listen}, {"peer-advertise", p.advertise}} {
		if a.value != "" {
			if err := checkHostPort(a.value); err != nil {
				bad = append(bad, fmt.Errorf("%s: %q, %w", a.name, a.value, err))
			}
		}
	}
	if p.advertise != "" && p.listen == "" {
		bad = append(bad, errors.New("peer-advertise: given without peer-listen, allowed: with it"))
	}
	return errors.Join(append(bad, p.checkRDMA())...)
}

// allowValue is the hosts of --peer-allow.
type allowValue allow.Hosts

func (a *allowValue) Type() string { return "hosts" }

func (a *allowValue) String() string {
	if hosts := (*allow.Hosts)(a); !hosts.Any() {
		return hosts.String()
	}
	return ""
}

func (a *allowValue) Set(text string) error {
	hosts, err := allow.Parse(text)
	*a = allowValue(hosts)
	return err
}

func checkHostPort(text string) error {
	_, port, err := net.SplitHostPort(text)
	if err == nil {
		_, err = strconv.ParseUint(port, 10, 16)
	}
	if err != nil || len(text) > ipc.MaxPeerAddress {
		return fmt.Errorf("allowed: host:port with a number from 0 to 65535, at most %d bytes", ipc.MaxPeerAddress)
	}
	return nil
}

// auth reads the key or the certificates; ok is false if there are none.
func (p *Settings) auth() (a peer.Auth, ok bool, err error) {
	switch {
	case p.keyFile != "":
		a, err = peer.LoadKey(p.keyFile)
	case p.tlsDir != "":
		file := func(name string) string { return filepath.Join(p.tlsDir, name) }
		a, err = peer.LoadTLS(file(tlsCert), file(tlsKey), file(tlsCA))
	default:
		return a, false, nil
	}
	return a, true, err
}

// Node is an agent's part among those of other nodes.
type Node struct {
	peering  *Peering        // nil: the agent is on its own
	listener net.Listener    // nil: other agents are not served
	reads    *mooncake.Reads // nil: there are no one-sided reads
}

// Open prepares to fetch from other agents into a stack of tiers and to serve them from its memory,
// and sets what the guests know of them. An agent without a key or certificates is on its own. rare
// drops like lines.
func (p *Settings) Open(
	memory *dram.Pool, stack pool.Memory, noSums bool, part *guests.Peers, log, rare *zap.Logger,
) (*Node, error) {
	auth, ok, err := p.auth()
	if err != nil {
		return nil, settings.Invalid(err)
	}
	if !ok {
		return &Node{}, nil
	}
	out := &Node{}
	if p.listen != "" {
		if out.listener, err = net.Listen("tcp", p.listen); err != nil {
			return nil, fmt.Errorf("peer-listen: %w", err)
		}
		part.Address = p.address(out.listener.Addr())
		log.Info("peers", zap.Stringer("listen", out.listener.Addr()), zap.String("advertised", part.Address),
			zap.Stringer("auth", auth))
	}
	o := Options{
		Memory: memory, Slots: stack, Auth: auth, Allow: p.allow, Timeout: p.timeout,
		NoSums: noSums,
		Log:    func(peer, what string, err error) { rare.Warn(what, zap.String("peer", peer), zap.Error(err)) },
	}
	if p.rdma.protocol != "" {
		if out.reads, err = p.openReads(part.Address, memory, log); err != nil {
			return nil, settings.Invalid(errors.Join(err, out.Close()))
		}
		o.Reader = out.reads
	}
	if out.peering, err = New(o); err != nil {
		return nil, settings.Invalid(errors.Join(err, out.Close()))
	}
	part.Fetch, part.Deliver = out.peering.Fetch, out.peering.Deliver
	part.Leave, part.Stop = out.peering.Close, out.peering.StopServing
	part.Report = func() *admin.PeersStatus {
		reads := admin.Reads{Protocol: p.rdma.protocol}
		if out.reads != nil {
			_, reads.Reason = out.reads.Exposed()
		}
		client, server := out.peering.Stats()
		return admin.NewPeersStatus(&client, &server, reads)
	}
	return out, nil
}

// address returns what other agents are told: as configured, or where the agent listens.
func (p *Settings) address(listens net.Addr) string {
	if p.advertise != "" {
		return p.advertise
	}
	host, port, err := net.SplitHostPort(listens.String())
	if err != nil {
		return listens.String()
	}
	if ip := net.ParseIP(host); ip != nil && ip.IsUnspecified() {
		if name, err := os.Hostname(); err == nil {
			host = name
		}
	}
	return net.JoinHostPort(host, port)
}

// Serve begins to serve other agents, if there is a listener.
func (p *Node) Serve(a *guests.Guests) error {
	if p.listener == nil {
		return nil
	}
	return p.peering.Serve(p.listener, a)
}

// Close ends what the guests have not.
func (p *Node) Close() (err error) {
	if p.peering != nil {
		err = errors.Join(p.peering.StopServing(), p.peering.Close())
	}
	if p.listener != nil {
		_ = p.listener.Close() // it is closed already if it was served
	}
	if p.reads != nil {
		err = errors.Join(err, p.reads.Close())
	}
	return err
}

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
func (p *Settings) openReads(address string, memory *dram.Pool, log *zap.Logger) (*mooncake.Reads, error) {
	r := &p.rdma
	host := r.host
	if host == "" { // the name by which other nodes reach this one
		host, _, _ = net.SplitHostPort(address) // empty: the host's own
	}
	if host == "" {
		var err error
		if host, err = os.Hostname(); err != nil {
			return nil, err
		}
	}
	base, fd := memory.Arena()
	reads, err := mooncake.OpenReads(mooncake.ReadsOptions{
		Protocol: r.protocol, Devices: r.devices, Host: host, Python: r.python,
		Arena: mooncake.Memory{Base: base, FD: fd}, Within: 2 * p.timeout, SetupWithin: pinWithin,
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

// checkRDMA validates the combination of --peer-rdma with other settings.
func (p *Settings) checkRDMA() error {
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
