import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.net.InetAddress;
import java.nio.charset.StandardCharsets;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import org.apache.kafka.common.Uuid;
import org.apache.kafka.common.acl.AclOperation;
import org.apache.kafka.common.acl.AclPermissionType;
import org.apache.kafka.common.metrics.Metrics;
import org.apache.kafka.common.metrics.internals.PluginMetricsImpl;
import org.apache.kafka.common.resource.PatternType;
import org.apache.kafka.common.resource.ResourcePattern;
import org.apache.kafka.common.resource.ResourceType;
import org.apache.kafka.common.security.auth.KafkaPrincipal;
import org.apache.kafka.common.security.auth.SecurityProtocol;
import org.apache.kafka.common.utils.SecurityUtils;
import org.apache.kafka.metadata.authorizer.StandardAcl;
import org.apache.kafka.metadata.authorizer.StandardAuthorizer;
import org.apache.kafka.server.authorizer.Action;
import org.apache.kafka.server.authorizer.AuthorizableRequestContext;
import org.apache.kafka.server.authorizer.AuthorizationResult;

/**
 * Has Apache Kafka's own authorizer decide what comes in as lines of fields between tabs, and prints 1 or 0 for each.
 *
 * S super-users                                          begins a set of rules
 * A type name pattern principal host operation permission   is one of its rules
 * Q principal host operation type name                   asks about one resource
 * T principal host operation type                        asks about any resource of a type
 */
public class Decide {
    private static StandardAuthorizer authorizer;
    private static Map<Uuid, StandardAcl> acls = new HashMap<>();
    private static String superUsers = "";

    public static void main(String[] arguments) throws Exception {
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        PrintStream out = new PrintStream(new java.io.BufferedOutputStream(System.out, 1 << 16), false, "UTF-8");
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            String[] f = line.split("\t", -1);
            switch (f[0]) {
                case "S" -> {
                    acls = new HashMap<>();
                    superUsers = f[1];
                    authorizer = null;
                }
                case "A" -> acls.put(
                    Uuid.randomUuid(),
                    new StandardAcl(ResourceType.valueOf(f[1]), f[2], PatternType.valueOf(f[3]), f[4], f[5],
                        AclOperation.valueOf(f[6]), AclPermissionType.valueOf(f[7])));
                case "Q" -> {
                    ResourcePattern pattern = new ResourcePattern(ResourceType.valueOf(f[4]), f[5], PatternType.LITERAL);
                    Action action = new Action(AclOperation.valueOf(f[3]), pattern, 1, false, false);
                    out.println(said(loaded().authorize(context(f[1], f[2]), List.of(action)).get(0)));
                }
                case "T" -> out.println(said(loaded().authorizeByResourceType(
                    context(f[1], f[2]), AclOperation.valueOf(f[3]), ResourceType.valueOf(f[4]))));
                default -> throw new IllegalArgumentException(line);
            }
        }
        out.flush();
    }

    private static StandardAuthorizer loaded() {
        if (authorizer == null) {
            authorizer = new StandardAuthorizer();
            authorizer.withPluginMetrics(new PluginMetricsImpl(new Metrics(), Map.of()));
            authorizer.configure(Map.of("super.users", superUsers, "node.id", "1"));
            authorizer.loadSnapshot(acls);
            authorizer.completeInitialLoad();
        }
        return authorizer;
    }

    private static String said(AuthorizationResult result) {
        return result == AuthorizationResult.ALLOWED ? "1" : "0";
    }

    private static AuthorizableRequestContext context(String principal, String host) throws Exception {
        KafkaPrincipal parsed = SecurityUtils.parseKafkaPrincipal(principal);
        InetAddress address = InetAddress.getByName(host);
        return new AuthorizableRequestContext() {
            @Override public String listenerName() { return "L"; }
            @Override public SecurityProtocol securityProtocol() { return SecurityProtocol.SASL_SSL; }
            @Override public KafkaPrincipal principal() { return parsed; }
            @Override public InetAddress clientAddress() { return address; }
            @Override public int requestType() { return 0; }
            @Override public int requestVersion() { return 0; }
            @Override public String clientId() { return "c"; }
            @Override public int correlationId() { return 0; }
        };
    }
}
