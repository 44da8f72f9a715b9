package s3

import (
	"cmp"
	"crypto/tls"
	"errors"
	"fmt"
	"net/http"
	"regexp"
	"strings"
	"time"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"

	"github.com/kvagent/kvagent/pool/remote"
)

// Options of a store. Fields left zero take their default, if one is named.
type Options struct {
	Endpoint  string      // host or host:port of the service; default s3.amazonaws.com
	Insecure  bool        // HTTP instead of HTTPS
	TLS       *tls.Config // for HTTPS; nil: the system's authorities. Not with Insecure or Transport
	Region    string      // empty: the service is asked
	PathStyle bool        // the bucket is in the path instead of the host's name
	Bucket    string      // must exist
	Prefix    string      // of every object's name, at most MaxPrefix bytes; default "kvagent/"

	// Keys to sign requests with. Without them, those of the environment are used
	// (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN), then those of the file named
	// by AWS_SHARED_CREDENTIALS_FILE (~/.aws/credentials), then those of the machine's role.
	AccessKey, SecretKey, SessionToken string

	Concurrency int           // concurrent requests; default 64
	DialTimeout time.Duration // default 2 s
	// Transport makes the requests in tests. The store does not close it.
	Transport http.RoundTripper
	// OnState is called with changes of the store's state, and once, with an unchanged state, if
	// the keys may not list the bucket. It must not call the store. May be nil.
	OnState remote.OnState
}

// Limits of options.
const (
	MaxPrefix = 256
	maxValue  = 4 << 30 // bytes of an object; one PUT takes at most 5 GiB
)

var bucketName = regexp.MustCompile(`^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$`)

func (o *Options) complete() error {
	o.Endpoint = cmp.Or(o.Endpoint, "s3.amazonaws.com")
	o.Prefix = cmp.Or(o.Prefix, "kvagent/")
	o.Concurrency = cmp.Or(o.Concurrency, 64)
	o.DialTimeout = cmp.Or(o.DialTimeout, 2*time.Second)
	return errors.Join(
		o.checkNames(),
		remote.Between("s3", "Prefix", len(o.Prefix), 1, MaxPrefix),
	)
}

func (o *Options) checkNames() error {
	switch {
	case !bucketName.MatchString(o.Bucket):
		return fmt.Errorf("s3: Bucket is %q, allowed: 3 to 63 lower-case letters, digits, dots and hyphens", o.Bucket)
	case strings.HasPrefix(o.Prefix, "/") || strings.Contains(o.Prefix, "//") || strings.Contains(o.Prefix, ".."):
		return fmt.Errorf("s3: Prefix is %q, allowed: one that does not begin with a slash, "+
			"without empty or double-dot parts", o.Prefix)
	case strings.ContainsAny(o.Endpoint, "/@?#"):
		return fmt.Errorf("s3: Endpoint is %q, allowed: host or host:port", o.Endpoint)
	case o.TLS != nil && (o.Insecure || o.Transport != nil):
		return errors.New("s3: TLS and Insecure or Transport, allowed: one of them")
	case (o.AccessKey == "") != (o.SecretKey == ""):
		return fmt.Errorf("s3: AccessKey and SecretKey, allowed: both or none")
	}
	return nil
}

// client returns the library's client, without retries: callers have deadlines and count failures.
func (o *Options) client(transport http.RoundTripper) (*minio.Core, error) {
	lookup := minio.BucketLookupAuto
	if o.PathStyle {
		lookup = minio.BucketLookupPath
	}
	return minio.NewCore(o.Endpoint, &minio.Options{
		Creds: o.credentials(), Secure: !o.Insecure, Region: o.Region, BucketLookup: lookup,
		Transport: transport, MaxRetries: 1,
	})
}

func (o *Options) credentials() *credentials.Credentials {
	if o.AccessKey != "" {
		return credentials.NewStaticV4(o.AccessKey, o.SecretKey, o.SessionToken)
	}
	transport := newTransport(o)
	transport.DisableKeepAlives = true
	return credentials.NewChainCredentials([]credentials.Provider{
		&credentials.EnvAWS{}, &credentials.FileAWSCredentials{},
		&credentials.IAM{Client: &http.Client{
			Timeout: o.DialTimeout, Transport: bounded{transport},
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		}},
	})
}
